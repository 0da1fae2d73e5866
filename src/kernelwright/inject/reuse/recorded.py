"""A block's forward as programs: alone, without its first steps, and with those of the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...fuser import across_blocks, attention_by_lengths
from ...fuser.across_blocks import Head, Sources
from ...fuser.planning import Plan
from ...fuser.readable import short_counts
from ...fuser.recording import Recording
from ...fuser.running import Executable
from ..runtime.sites import mode
from .kept_prompts import KeptPrompt
from .prompt_values import PerForwardCache


@dataclass(frozen=True)
class BlockLine:
    """What became of the blocks of one class: how many ops are in how many kernels, in how many of
    a block between two others, which ops are left to PyTorch and how often, why some have no
    kernel, what masks say, and why a block does nothing for the next."""

    kind: str
    ops: int
    kernels: int
    left: dict[str, int]
    why: tuple[str, ...]
    masks: tuple[str, ...] = ()
    between: int | None = None
    apart: str | None = None

    def __str__(self) -> str:
        if not self.kernels:
            return f"{self.kind}: not recorded: {'; '.join(self.why)}"
        left = ", ".join(f"{n} {op}" for op, n in self.left.items())
        why = f" ({'; '.join(self.why)})" if self.why else ""
        kernels = f"{self.ops} ops in {self.kernels} kernels"
        if self.between is not None:
            kernels += f", {self.between} between two blocks"
        if self.apart is not None:
            kernels += f"; nothing is done for the next block: {self.apart}"
        return "; ".join([f"{self.kind}: {kernels}", f"PyTorch's: {left}{why}", *self.masks])


# plans a recording of blocks of a class again, with another graph; None if that cannot be
PlanAgain = Callable[[str, Recording], "Recorded | None"]


@dataclass(eq=False)
class Recorded:
    """A forward as programs, for all modules of one structure."""

    kind: str
    recording: Recording
    executable: Executable
    kernels: int
    plan: Plan
    plan_again: PlanAgain
    shared: PerForwardCache = field(default_factory=PerForwardCache)
    between: int | None = None  # kernels of a block that does its neighbour's first steps
    apart: str | None = None  # why a block does not
    _rests: dict[Head, Recorded | None] = field(default_factory=dict)
    _borders: dict[tuple[Recorded, Sources], Border | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._early = _Early(self, self)

    def outputs(self, inputs: Sequence[Tensor], prompts: Sequence[KeptPrompt] = ()) -> list[Any]:
        """What a forward returns, one after the other; what the blocks of a model share is made by
        the first of them, and what is made of a prompt is kept until another comes. A comparison
        makes everything anew."""
        early, kept = None, None
        if mode.notes is None and not mode.off:
            if self._early.places:
                early = self._early(inputs)
            if prompts:
                kept = [prompt(inputs) for prompt in prompts]
        return self.executable(inputs, early, kept)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """The result of a forward."""
        return self.recording.result(self.outputs(inputs))

    def described(self) -> BlockLine:
        left, refused = short_counts(self.plan.left), tuple(self.plan.refused)
        said = [said for said in self.executable.lengths.values() if said is not None]
        masks = tuple(dict.fromkeys(map(attention_by_lengths.described, said)))
        return BlockLine(
            *(self.kind, self.plan.ops, self.kernels, left, refused, masks),
            *(self.between, self.apart),
        )

    def rest(self, head: Head) -> Recorded | None:
        """The same without its first steps, whose results are further inputs."""
        if head not in self._rests:
            made = self.plan_again(self.kind, across_blocks.rest_of(self.recording, head))
            self._rests[head] = None if made is None else made.sharing(self)
        return self._rests[head]

    def sharing(self, block: Recorded) -> Recorded:
        """This one, which takes what all blocks share from another recording of the same block."""
        if set(self.executable.early_results) <= set(block.executable.early_results):
            self._early = _Early(self, block)
        return self

    def border(self, after: Recorded, sources: Sources) -> Border | None:
        """How this one and the next, which is given what `sources` say, run with fewer kernels;
        None if they do not."""
        key = after, sources
        if key not in self._borders:
            self._borders[key] = _border(self, after, sources)
        return self._borders[key]


class _Early:
    """What a recording takes of the early steps of another one of the same block, or its own."""

    def __init__(self, user: Recorded, maker: Recorded) -> None:
        self.maker = maker
        own, more = len(maker.recording.weights), len(user.recording.weights)
        count = len(maker.recording.paths)
        # the weights of the user that are the maker's, and then what a block is given
        self.inputs = [*range(own), *range(more, more + count)]
        needed = user.executable.early_results
        self.places = [self.inputs[i] for i in maker.executable.early_inputs] if needed else []
        self.results = [maker.executable.early_results.index(name) for name in needed]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Any]:
        first, *others = [inputs[place] for place in self.places]

        def make() -> list[Any]:
            return self.maker.executable.early([inputs[i] for i in self.inputs])

        found = self.maker.shared(first, None, make, others)
        return [found[i] for i in self.results]


@dataclass(eq=False)
class Border:
    """Two recordings that run one after the other: the first does the first steps of the second."""

    before: Recorded
    after: Recorded
    head: Head
    sources: Sources
    rest: Recorded  # the second, without them
    results: int  # of the first
    _joined: dict[Recorded | None, With | None] = field(default_factory=dict)
    _by_ops: Executable | None = None

    def __post_init__(self) -> None:
        weights = len(self.after.recording.weights)
        # where to find what the head is given, among results and inputs of the first
        known = [self.sources[i - weights] for i in self.head.given]
        self.given = [i for i in known if i is not None]
        self.reads = [*self.head.weights, *self.head.given]

    def joined(self, rest: Recorded | None) -> With | None:
        """The first with the first steps of the second; without its own if it is given as `rest`,
        which is what is left of it then."""
        if rest not in self._joined:
            base = (rest or self.before).recording
            found = across_blocks.joined(base, self.after.recording, self.head, self.sources)
            made = self.before.plan_again(f"{self.before.kind} and the next", found.recording)
            own = [n.name for n in self.after.recording.graph.find_nodes(op="placeholder")]
            names = [own[i] for i in self.head.weights]
            called = dict(zip(names, found.weights, strict=True))
            self._joined[rest] = None if made is None else With(made.sharing(self.before), called)
        return self._joined[rest]

    def head_by_ops(self, inputs: Sequence[Tensor]) -> list[Any]:
        """What the first steps make of their weights and inputs, op by op."""
        if self._by_ops is None:
            made = across_blocks.head_alone(self.after.recording, self.head)
            self._by_ops = across_blocks.by_ops(made)
        return self._by_ops(inputs)


@dataclass(frozen=True)
class With:
    """A recording with the first steps of the next, and what the weights of that are called."""

    recorded: Recorded
    names: dict[str, str]


def _border(before: Recorded, after: Recorded, sources: Sources) -> Border | None:
    if before.recording.parallel or after.recording.parallel:
        return None
    (output,) = before.recording.graph.find_nodes(op="output")
    results = len(output.args[0])
    head = across_blocks.head_of(after.recording, after.plan, sources, results)
    rest = None if head is None else after.rest(head)
    if head is None or rest is None:
        return None
    border = Border(before, after, head, sources, rest, results)
    joined = border.joined(None)
    if joined is None:
        return None
    fewer = joined.recorded.kernels + rest.kernels < before.kernels + after.kernels
    # ops that have no kernel in a joined program would run one by one
    left = _left(joined.recorded) + _left(rest) > _left(before) + _left(after)
    return border if fewer and not left else None


def _left(recorded: Recorded) -> int:
    return sum(recorded.plan.left.values())

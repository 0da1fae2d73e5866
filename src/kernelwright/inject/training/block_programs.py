"""Forward and backward of a block as programs, and the node of autograd that runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn

from ...backends.torch_internals import keeps_graph
from ...fuser import planning
from ...fuser.joint_recording import Call, Joint, differentiate
from ...fuser.launching import Kernels
from ...fuser.module_twin import twin_of
from ...fuser.partition import Parted, part
from ...fuser.program import Program
from ...fuser.recording import Path, Recording
from ...fuser.rewriting import drop_factors_of_one, write_out_eps
from ...fuser.running import Executable
from ...fuser.views import packet
from ..reuse.program_sites import ProgramSites
from ..runtime.sites import EMPTY, eagerly, mode, set_mode
from .block_graph import Graphed, Layouts, Use, layouts_of
from .graphs import TrainingGraphs

ON_A_CPU = "for_cpu"  # in the names of attention's ops there


class Half:
    """The forward or the backward of a block, planned."""

    def __init__(
        self,
        name: str,
        recording: Recording,
        device: torch.device | None,
        fell_back: Counter[tuple[str, str]],
    ) -> None:
        kernels = Kernels(exact=True)
        self.plan = planning.plan(recording, None if device is None else kernels.why_not)
        programs = [step for step in self.plan.steps if isinstance(step, Program)]
        values = self.plan.values
        launched = {} if device is None else kernels.launched(programs, values, device)
        self.sites = ProgramSites(name, programs, launched, fell_back)
        self.programs = len(programs)
        self.run = Executable(self.plan, self.sites, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        return {"launchers": self.sites.launcher, "as_read": True, "by_algorithms": True}

    def with_results(self, known: dict[str, Any]) -> Executable:
        """The same, with these results instead of calling the ops of these names."""
        return _Told(known, self.plan, self.sites, **self._how)

    @property
    def summary(self) -> str:
        return f"{self.plan.ops} ops in {self.programs} kernels"


class _Told(Executable):
    """Takes the results of some ops as they are given."""

    def __init__(self, known: dict[str, Any], *plan: Any, **how: Any) -> None:
        self._known = known
        super().__init__(*plan, **how)

    def _leaf(self, node: fx.Node) -> Any:
        step = super()._leaf(node)
        if node.name in self._known:
            (place,) = step.writes
            value = self._known[node.name]
            step.run = lambda values: values.__setitem__(place, value)
        return step


@dataclass(eq=False)
class BlockPrograms:
    """What the blocks of one structure run for inputs and gradients of one layout."""

    kind: str
    joint: Joint
    parted: Parted
    forward: Half
    backward: Half
    differentiable: tuple[int, ...]  # numbers of the results that have a gradient
    layouts: Layouts  # of the gradients that the backward was recorded with

    @staticmethod
    def of(
        kind: str,
        joint: Joint,
        differentiable: Sequence[int],
        layouts: Layouts,
        device: torch.device | None,
        fell_back: Counter[tuple[str, str]],
    ) -> BlockPrograms:
        """Raises CannotIndex if the graph cannot be parted or planned."""
        drop_factors_of_one(joint.graph)
        write_out_eps(joint.graph)
        parted = part(joint)
        forward = Half(f"{kind}'s forward", parted.forward, device, fell_back)
        backward = Half(f"{kind}'s backward", parted.backward, device, fell_back)
        return BlockPrograms(kind, joint, parted, forward, backward, tuple(differentiable), layouts)

    @property
    def ops(self) -> int:
        return self.forward.plan.ops + self.backward.plan.ops

    @property
    def kernels(self) -> int:
        return self.forward.programs + self.backward.programs

    @cached_property
    def repeats(self) -> list[bool]:
        """Of each contribution, whether it has the same bits every time: the backward of attention
        adds in any order, except a CPU's, and flash's where deterministic algorithms are asked for.
        Programs that were recorded with them are never used without them."""
        graph = self.parted.backward.graph
        (output,) = graph.find_nodes(op="output")
        fixed = (ON_A_CPU, *["flash"] * torch.are_deterministic_algorithms_enabled())
        varying: set[fx.Node] = set()
        for node in graph.nodes:
            name = str(packet(node)) if node.op == "call_function" else ""
            attends = "attention" in name and not any(n in name for n in fixed)
            if attends or any(n in varying for n in node.all_input_nodes):
                varying.add(node)
        return [node not in varying for node in output.args[0]]

    def run_forward(
        self, inputs: Sequence[Tensor], run: Executable | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The results that it makes, and what it keeps for the backward beside its inputs."""
        made = (run or self.forward.run)(inputs)
        count = len(self.parted.results)
        return made[:count], made[count:]

    def run_backward(
        self,
        inputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        run: Executable | None = None,
        *,
        once: bool = False,
    ) -> list[Tensor]:
        """The contributions to the gradients of the inputs. With `once` the lists of inputs and of
        what was kept are emptied, so that each tensor is freed after its last use."""
        values = [inputs[i] for i in self.parted.given]
        values += [*kept, *(g for g in gradients if g is not None)]
        for emptied in (inputs, kept) if once else ():
            assert isinstance(emptied, list)
            emptied.clear()
        return (run or self.backward.run)(values, once=once)


@dataclass(eq=False)
class BoundBlock:
    """Programs with the places of one block's weights."""

    programs: BlockPrograms
    module: ref[nn.Module]
    call: Call
    places: list[tuple[dict[str, Any], str]]
    paths: tuple[Path, ...]
    # told of gradients that are not as those that the backward was recorded with
    surprised: Callable[[Layouts], None]
    # how many contributions each input gets, by number, if all results have gradients
    most: Counter[int]
    off: dict[str, str] = field(default_factory=dict)  # programs that run PyTorch's ops, and why
    graphs: TrainingGraphs | None = None  # those of the model, if its user wants any
    graphed: Graphed = field(default_factory=Graphed)
    on_loan: Graphed = field(default_factory=Graphed)

    def __str__(self) -> str:
        programs = self.programs
        text = f"forward {programs.forward.summary}, backward {programs.backward.summary}"
        off = "; ".join(f"{name} {why}" for name, why in self.off.items())
        return f"{text}; PyTorch's: {off}" if off else text

    def __post_init__(self) -> None:
        # the numbers of the inputs: one place for each contribution, since autograd adds them in
        # this order, then places for those that gradients of more results give: `by_autograd`
        found = self.programs.joint.contributions
        self.slots = (*found, *(self.most - Counter(found)).elements())

    def __call__(self, args: Any, kwargs: Any) -> Any:
        inputs = [holder[name] for holder, name in self.places]
        for path in self.paths:
            found: Any = (args, kwargs)
            for step in path:
                found = step(found)
            inputs.append(found)
        joint = self.programs.joint
        made = iter(_Node.apply(self, inputs, *(inputs[i] for i in self.slots)))
        results = [
            inputs[joint.handed_on[i]] if i in joint.handed_on else next(made)
            for i in range(joint.results)
        ]
        return joint.returns(results)

    @property
    def weights(self) -> int:
        return len(self.places)

    @property
    def layouts(self) -> Layouts:
        return self.programs.layouts

    @property
    def repeats(self) -> list[bool]:
        return self.programs.repeats

    def run_forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with _mode_of(self):
            return self.programs.run_forward(inputs)

    def run_backward(
        self,
        inputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        once: bool = False,
    ) -> list[Tensor]:
        with _mode_of(self):
            return self.programs.run_backward(inputs, kept, gradients, once=once)

    def by_autograd(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The contributions as autograd finds them, one for each of `slots`: the block's own
        forward runs again."""
        module = self.module()
        if module is None:
            raise RuntimeError(f"{self.programs.kind}: deleted before its backward ran")
        with eagerly():
            found = differentiate(twin_of(module), self.call, inputs, lambda _: gradients)
        slots: dict[int, list[int]] = {}
        for slot, number in enumerate(self.slots):
            slots.setdefault(number, []).append(slot)
        contributions: list[Tensor | None] = [None] * len(self.slots)
        for number, value in found.contributions:
            own = slots.get(number, [])
            if len(own) > 1:
                contributions[own.pop(0)] = value
            elif own:
                before = contributions[own[0]]
                contributions[own[0]] = value if before is None else before + value
        return contributions


class _Node(torch.autograd.Function):
    """A block in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, bound: BoundBlock, inputs: list[Tensor], *slots: Tensor) -> Any:
        programs = bound.programs
        replayed = None if bound.graphs is None else bound.graphs.forward(bound, inputs)
        results, kept = replayed or bound.run_forward(inputs)
        ctx.use = kept if isinstance(kept, Use) else None
        if not isinstance(kept, Use):  # else the graph has what its backward needs
            ctx.given = len(inputs) - bound.weights
            ctx.save_for_backward(*inputs[bound.weights :], *kept)
        ctx.bound, ctx.weights = bound, _Weights(inputs[: bound.weights])
        ctx.set_materialize_grads(False)
        fixed = [
            t
            for i, t in zip(programs.parted.results, results, strict=True)
            if i not in programs.differentiable
        ]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        bound: BoundBlock = ctx.bound
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True: {bound.programs.kind} runs as kernels that have no second "
                f"derivative; call kernelwright.restore(model) first, or leave its blocks out with "
                f"inject(..., skip={bound.programs.kind!r})"
            )
        saved = ctx.saved_tensors
        weights = ctx.weights.unchanged(bound.programs.kind)
        whole: list[Tensor | None] = [None] * bound.programs.joint.results
        for i, gradient in zip(bound.programs.parted.results, gradients, strict=True):
            whole[i] = gradient
        if ctx.use is None:
            inputs, kept = [*weights, *saved[: ctx.given]], list(saved[ctx.given :])
            del saved
            if once := not keeps_graph():
                ctx.maybe_clear_saved_tensors()
            found = _contributions(bound, inputs, kept, whole, once)
        else:
            found = _from_graph(bound, ctx.use, weights, whole)
            if not keeps_graph():
                ctx.use.done = True
        return (None, None, *found, *[None] * (len(bound.slots) - len(found)))


class _Weights:
    """The weights of a forward, for its backward. Autograd would save them through its hooks, those
    of gradient checkpointing for example, which take the host longer than the block's kernels."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._versions = [t._version for t in tensors]

    def unchanged(self, kind: str) -> Sequence[Tensor]:
        """The weights; raises as autograd does if one was written to since."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"a weight {list(tensor.shape)} of {kind}, needed for its gradients, has been "
                    f"modified by an inplace operation after the forward"
                )
        return self._tensors


def _contributions(
    bound: BoundBlock,
    inputs: Sequence[Tensor],
    kept: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    once: bool = False,
) -> Sequence[Tensor | None]:
    layouts = layouts_of(gradients)
    if layouts != bound.programs.layouts:
        bound.surprised(layouts)
        return bound.by_autograd(inputs, gradients)
    bound.graphed.backward_ran = True
    graph = bound.on_loan.graph
    if graph is None or not graph.lent(kept):
        return bound.run_backward(inputs, kept, gradients, once)
    # no other forward has run in its memory as long as these tensors are alive
    assert bound.graphs is not None
    found = bound.graphs.backward(graph, inputs[: bound.weights], gradients)
    if found is not None:
        return found
    with graph.exclusive():
        return graph.apart(bound.run_backward(inputs, kept, gradients))


def _from_graph(
    bound: BoundBlock, use: Use, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """The contributions of a forward that ran as a graph."""
    if use.done:
        raise RuntimeError(
            f"{bound.programs.kind}: backward through a graph a second time; pass "
            f"retain_graph=True to the first"
        )
    if layouts_of(gradients) == bound.programs.layouts:
        assert bound.graphs is not None
        found = bound.graphs.backward(use.graph, weights, gradients)
        if found is not None:
            return found
    graph = use.graph
    with graph.exclusive():
        inputs = [*weights, *graph.inputs]
        return graph.apart(_contributions(bound, inputs, graph.kept, gradients))


def _mode_of(bound: BoundBlock) -> Any:
    """Programs run as they were compared. A backward may run in a thread of its own."""
    if mode.off is EMPTY and not bound.off and mode.notes is None:
        return _as_it_is
    return set_mode(off=bound.off or EMPTY, notes=None, comparing=False)


class _AsItIs:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


_as_it_is = _AsItIs()

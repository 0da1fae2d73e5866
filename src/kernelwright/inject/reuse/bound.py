"""A recording with the weights of one module, and the work that the module does for the next one.

The order of blocks is learned while they run: a block notes what it was given and what it returned,
and the next one finds out which of its own inputs these are. From then on a block guesses what the
next will be given. A border between two blocks is tried before it is relied on: each result has to
have the bits of the block that runs alone, which first sight has compared with eager's. It is given
up if the next block is given other tensors than was guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from ...backends.torch_internals import dispatch_modes, layout_check, pytree
from ...errors import in_one_line
from ...fuser.cached_attention import Attend
from ...fuser.recorded_ops import opaque_layers
from ...fuser.running import OtherShape
from ..graphs.capture import capturing
from ..graphs.host_reads import reading
from ..identify.structure import layout
from ..runtime import comparisons, model_run, work_ahead
from ..runtime.sites import DIFFERS, NO_MEMORY, mode
from ..state.weights_at_rest import is_at_rest
from .cached_calls import BlockCall, OwnCalls, caches_aside, running_call
from .kept_prompts import KeptPrompt
from .program_products import running
from .recorded import Border, Recorded

# the module of each weight of a recording
Owners = Sequence[ref[nn.Module]]
# guesses about the next block that may fail: one, because it may have changed since it ran
MAX_MISSES = 2


@dataclass(eq=False)
class Variant:
    """A block as one of its recordings: alone, or with work of or for its neighbours."""

    recorded: Recorded
    layers: Mapping[str, nn.Module]  # the layer of each weight that is a matrix
    prompts: Sequence[KeptPrompt]
    trusted: bool = False
    refused: bool = False
    calls: int = 0  # while it was not trusted

    def outputs(self, inputs: Sequence[Tensor], keeping: bool = True) -> list[Any]:
        before, running.layers = running.layers, self.layers
        try:
            return self.recorded.outputs(inputs, self.prompts if keeping else ())
        finally:
            running.layers = before

    def is_due(self) -> bool:
        """Whether to try it now: values that proved nothing may go on doing so."""
        self.calls += 1
        return not self.refused and not self.calls & (self.calls - 1)


@dataclass(eq=False)
class Handed:
    """What a block has done for the next one."""

    by: Bound
    to: Bound
    border: Border
    values: list[Any]


@dataclass(eq=False)
class Next:
    """The block that came after one the last time, and its inputs as places among the results and
    the inputs of the one before."""

    module: ref[nn.Module]
    bound: ref[Bound]
    sources: tuple[int | None, ...]
    border: Border | None = None  # found when the block runs again
    same_layouts: Callable[..., bool] = lambda *weights: False

    def weights(self, bound: Bound) -> list[Tensor] | None:
        """What is read ahead; None if it lies otherwise than when it was recorded."""
        assert self.border is not None
        places, head = bound.places, self.border.head.weights
        found = [places[i][0][places[i][1]] for i in head]
        if self.same_layouts(*found):
            return found
        if [layout(t) for t in found] != [bound.layouts[i] for i in head]:
            return None
        self.same_layouts = layout_check(found)
        return found


@dataclass(eq=False)
class Ahead:
    """The block that a call works for, and the weights that it reads for that."""

    module: nn.Module
    bound: Bound
    border: Border
    weights: list[Tensor]

    def reads(self, results: Sequence[Any], given: Sequence[Tensor]) -> list[Tensor]:
        """What the block's first steps read."""
        known = [*results, *given]
        return [*self.weights, *[known[i] for i in self.border.given]]


class Ran:
    """A block that has just run, for the next one. It keeps no tensor alive."""

    def __init__(self, bound: Bound, results: Sequence[Any], given: Sequence[Tensor]) -> None:
        self.bound, self.results = bound, len(results)
        self.known = [ref(t) if isinstance(t, Tensor) else None for t in (*results, *given)]

    def returns_instead(self, results: Any, others: Any) -> None:
        """The block returns `others` in the place of `results`."""
        pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(others), strict=True)
        places = {id(ours): theirs for ours, theirs in pairs if isinstance(theirs, Tensor)}
        for i, held in enumerate(self.known):
            if held is not None and (theirs := places.get(id(held()))) is not None:
                self.known[i] = ref(theirs)

    def sources(self, given: Sequence[Tensor]) -> tuple[int | None, ...]:
        """For each tensor its place among the results and then the inputs of this block."""
        known = enumerate(self.known)
        places = {id(t): i for i, held in known if held is not None and (t := held()) is not None}
        return tuple(places.get(id(t)) for t in given)


@dataclass(eq=False)
class Bound:
    """A recording with the places of one module's weights."""

    recorded: Recorded
    places: list[tuple[dict[str, Any], str]]
    layouts: list[Any]
    same_layouts: Callable[..., bool]  # finds most that are the same, in less time
    opaque: tuple[nn.Module, ...]
    layers: dict[str, nn.Module]
    owners: Owners
    prompts: Callable[[Recorded, Mapping[str, nn.Module], Owners], list[KeptPrompt]]
    exact: bool
    caches: OwnCalls  # what it calls of caches
    attend: Attend
    next: Next | Literal["unknown", "none"] = "unknown"
    misses: int = 0
    _guessed: bool = False  # whether a guess has failed
    _variants: dict[tuple[Recorded | None, Border | None], Variant | None] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        prompts = self.prompts(self.recorded, self.layers, self.owners)
        self.alone = Variant(self.recorded, self.layers, prompts, True)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a forward, or a `str`: why the module's own has to run this time."""
        weights = [holder[name] for holder, name in self.places]
        if not self.same_layouts(*weights):
            if not all(map(_lies_as, weights, self.layouts)):
                return "weights of another layout than when they were recorded"
            self.same_layouts = layout_check(weights)
        recording = self.recorded.recording
        given = recording.given(args, kwargs)
        try:
            if not (self.opaque or self.caches):
                results = self._outputs(module, weights, given)
            else:
                call = BlockCall(module, args, kwargs, self.caches, self.attend)
                if (why := call.why_not()) is not None:
                    return why
                with opaque_layers(self.opaque), running_call(call):
                    results = self._outputs(module, weights, given)
        except OtherShape:
            return "a result whose shape depends on values has another one"
        return recording.finish(results, args, kwargs)

    def _outputs(self, module: nn.Module, weights: list[Tensor], given: list[Tensor]) -> list[Any]:
        ran = work_ahead.last_run()
        if ran is not None:
            ran.bound.learn(ran, module, self, given)
        if mode.notes is not None or mode.off:
            if mode.off:  # some of its programs are not used
                work_ahead.decline()
            results = self.alone.outputs([*weights, *given])
        else:
            results = self._with_neighbours(module, weights, given)
        if self.next == "unknown":
            work_ahead.note_run(Ran(self, results, given))
        return results

    # learning what comes next

    def learn(self, ran: Ran, module: nn.Module, after: Bound, given: Sequence[Tensor]) -> None:
        """Note which block came next, and which of its inputs were known here."""
        sources = ran.sources(given)
        if any(s is not None and s < ran.results for s in sources):
            self.next = Next(ref(module), ref(after), sources)
        else:
            self._stop()

    def _stop(self) -> None:
        """Guess no more what comes next, after one more time."""
        self.misses += 1
        self.next = "none" if self.misses >= MAX_MISSES else "unknown"
        if self.next == "none" and self._guessed:
            self.recorded.apart = "it was given other tensors than expected"

    def _missed(self) -> None:
        """Nobody took what was done for the next block."""
        self._guessed = True
        self._stop()

    def _following(self, module: nn.Module) -> Ahead | None:
        """The block that this one may work for."""
        found = self.next
        if not isinstance(found, Next):
            return None
        after, bound = found.module(), found.bound()
        if after is None or bound is None:
            self._stop()
            return None
        if not work_ahead.is_allowed(module, after):
            return None
        if found.border is None:
            if capturing():  # nothing can be compiled now
                return None
            found.border = self.recorded.border(bound.recorded, found.sources)
            if found.border is None:
                self.next = "none"
                return None
        weights = found.weights(bound)
        return None if weights is None else Ahead(after, bound, found.border, weights)

    # running

    def _with_neighbours(
        self, module: nn.Module, weights: list[Tensor], given: list[Tensor]
    ) -> list[Any]:
        """The block with the work of the one before it and for the one after it."""
        inputs = [*weights, *given]
        taken, ahead = self._taken(module, inputs), self._following(module)
        if taken is None and ahead is None:
            return self.alone.outputs(inputs)
        variant = self._variant(taken, ahead)
        if variant is None or not (variant.trusted or _may_try(module, variant)):
            return self.alone.outputs(inputs)
        whole = [*weights, *(ahead.weights if ahead else ()), *given]
        if taken is not None:
            whole += taken.values
        if not variant.trusted:
            return self._tried(variant, inputs, whole, taken, ahead)
        outputs = variant.outputs(whole)
        return outputs if ahead is None else self._handed_on(outputs, given, ahead)

    def _taken(self, module: nn.Module, inputs: list[Tensor]) -> Handed | None:
        """What the block before has done for this one, with these inputs and weights."""
        found = work_ahead.offered(module)
        if found is None:
            return None
        if not isinstance(found, Handed) or found.to is not self:
            work_ahead.decline()
            return None
        return work_ahead.take(module, *[inputs[i] for i in found.border.reads])

    def _handed_on(self, outputs: list[Any], given: list[Tensor], ahead: Ahead) -> list[Any]:
        """Offer the next block what was done for it; the results of this one."""
        results, handed = outputs[: ahead.border.results], outputs[ahead.border.results :]
        value = Handed(self, ahead.bound, ahead.border, handed)
        work_ahead.offer(ahead.module, ahead.reads(results, given), value, self._missed)
        return results

    def _tried(
        self,
        variant: Variant,
        alone: list[Tensor],
        inputs: list[Tensor],
        taken: Handed | None,
        ahead: Ahead | None,
    ) -> list[Any]:
        """Run a variant beside the block alone, and rely on it from now on if it has its bits: in
        every tier a model gives the same bits at each call."""

        def conclude(same: bool, informative: bool) -> None:
            if same:
                variant.trusted = informative
            elif informative:
                self._refuse(variant, taken, ahead, DIFFERS)

        given = alone[len(self.places) :]
        if (aside := caches_aside()) is None:
            return self.alone.outputs(alone)
        expected = self.alone.outputs(alone, keeping=False)
        try:
            with aside:
                outputs = variant.outputs(inputs)
            wanted = list(expected)
            if ahead is not None and self.exact:
                # in the other tiers it is not rounded as op by op; the next block compares its own
                wanted += ahead.border.head_by_ops(ahead.reads(expected, given))
            ours, theirs = aside.written()
            ours, theirs = [*outputs[: len(wanted)], ours], [*wanted, theirs]
            known = comparisons.compare(ours, theirs, outputs, conclude)
        except torch.OutOfMemoryError:
            self._refuse(variant, taken, ahead, NO_MEMORY)
            return expected
        if known and not variant.trusted:
            return expected
        # what it did for the next block is compared there, too, before anything relies on it
        outputs[: len(expected)] = expected
        return outputs if ahead is None else self._handed_on(outputs, given, ahead)

    def _refuse(
        self, variant: Variant, taken: Handed | None, ahead: Ahead | None, why: str
    ) -> None:
        """Do without a variant, and without the work of and for its neighbours."""
        variant.refused = True
        if taken is not None:
            taken.by.give_up(why)
        if ahead is not None:
            self.give_up(why)

    def give_up(self, why: str) -> None:
        """Do no more for the next block."""
        self.next, self.recorded.apart = "none", why

    def _variant(self, taken: Handed | None, ahead: Ahead | None) -> Variant | None:
        rest = None if taken is None else taken.border.rest
        border = None if ahead is None else ahead.border
        key = rest, border
        if key not in self._variants:
            self._variants[key] = None
            try:
                self._variants[key] = self._made(rest, border, ahead)
            except Exception as error:
                self.give_up(f"its programs failed ({in_one_line(error)})")
        return self._variants[key]

    def _made(
        self, rest: Recorded | None, border: Border | None, ahead: Ahead | None
    ) -> Variant | None:
        if border is None or ahead is None:
            assert rest is not None
            return Variant(rest, self.layers, self.prompts(rest, self.layers, self.owners))
        if capturing() or (made := border.joined(rest)) is None:
            return None
        if rest is not None:
            fewest = self.recorded.between or made.recorded.kernels
            self.recorded.between = min(fewest, made.recorded.kernels)
        # the layers of the next block may be gone before this one is
        layers: WeakValueDictionary[str, nn.Module] = WeakValueDictionary(self.layers)
        theirs = ahead.bound.layers
        layers.update({name: theirs[own] for own, name in made.names.items() if own in theirs})
        owners = [*self.owners, *(ahead.bound.owners[i] for i in border.head.weights)]
        prompts = self.prompts(made.recorded, layers, owners)
        return Variant(made.recorded, layers, prompts)


def _lies_as(weight: Tensor, recorded: Any) -> bool:
    """Whether a weight has a layout. One that rests on the CPU since its layer runs in fp8 is only
    read by that layer, which fetches it if need be."""
    found = layout(weight)
    if found == recorded:
        return True
    return None not in (found, recorded) and found[:3] == recorded[:3] and is_at_rest(weight)


def _may_try(module: nn.Module, variant: Variant) -> bool:
    """Whether a block may run twice now, to compare."""
    if capturing() or reading() or dispatch_modes() or not model_run.may_run_twice(module):
        return False
    return variant.is_due()

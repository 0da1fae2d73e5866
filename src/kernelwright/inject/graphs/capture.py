"""Recording a forward, and doing again what was recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...backends.torch_internals import pytree
from ..runtime.random_draws import of as drawn
from ..state.tensor_samples import Answer, compared, copied, samples, told, unchanged
from .buffers import Refusal, Results, Room
from .mask_decisions import Decisions
from .prompt_graph import Prelude
from .recorder import Recorder

T = TypeVar("T")
DRAWS = "it draws random numbers"


class _Running(threading.local):
    kept: list[Any] | None = None
    given: list[Tensor] | None = None
    phase: int = 0
    relocations: int = 0


_running = _Running()


def keep(value: T) -> T:
    """Hand out a value of a cache: if this thread is capturing, its graph keeps the value alive."""
    if _running.kept is not None:
        _running.kept.append(value)
    return value


def phase() -> int:
    """A number that changes whenever this thread begins or ends to record. What was made in one
    phase is not part of what is recorded in another, even if it was made of the same tensor."""
    return _running.phase


def depend(tensor: Tensor) -> None:
    """If this thread is capturing: what its graph does holds as long as nobody writes to this
    tensor, of which something was made that the graph reads instead."""
    if _running.given is not None:
        _running.given.append(tensor)


def relocated() -> None:
    """Say that weights of the running model were given another place in memory, by us."""
    _running.relocations += 1


def relocations() -> int:
    """How often this thread has said so."""
    return _running.relocations


def capturing() -> bool:
    """Whether this thread is capturing for a graph of ours: tensors then have no values yet."""
    return _running.kept is not None


class Captured:
    """A forward captured for one signature. A call copies the inputs in, replays, and copies the
    results out."""

    def __init__(
        self,
        recorder: Recorder,
        forward: Callable[..., Any],
        inputs: Sequence[Tensor],
        arguments: Callable[[Sequence[Tensor]], tuple[tuple, dict[str, Any]]],
        weights: Sequence[Tensor],
    ) -> None:
        self._recorder = recorder
        self._home = recorder.stream()
        self._rooms = [Room(i) for i in inputs]
        memory = self._memory = [room.tensor for room in self._rooms]
        args, kwargs = arguments(memory)
        leaves = pytree.tree_leaves((args, kwargs))
        device = memory[0].device
        prelude = self._prelude = Prelude(memory)
        decisions = self._decisions = Decisions()
        for room, given in zip(self._rooms, inputs, strict=True):
            room.fill(given)

        def run() -> Any:
            with prelude.running(), decisions.running(), recording():
                return forward(*args, **kwargs)

        def make_again() -> None:
            with recording():
                prelude.make_again()

        devices = {device} if device.type == "cuda" else set()
        before = drawn(devices)
        run()
        if drawn(devices) != before:  # it did not in the call before this one
            raise Refusal(DRAWS)
        prelude.collecting = decisions.collecting = False
        versions = [t._version for t in memory]
        self._replay_prelude: Callable[[], None] | None = None
        with _keeping() as (self._kept, self._given), _autocast_without_cache(device):
            if prelude.sources:
                self._replay_prelude, _ = recorder.record(make_again, device)
            self._replay, result = recorder.record(run, device)
        self._given += prelude.weights
        if versions != [t._version for t in memory]:
            raise Refusal("forward writes to its inputs")
        if list(map(id, pytree.tree_leaves((args, kwargs)))) != list(map(id, leaves)):
            raise Refusal("forward changes a list or a dict among its inputs")
        kept = list({id(t): t for t in self._given}.values())
        self._then = [words.clone() for words in samples(kept)]
        # one launch: to compare a hundred weights one by one takes the host milliseconds
        self._compare: Callable[[], None] | None = None
        if kept:
            self._compare, self._compared = recorder.record(
                lambda: compared(samples(kept), self._then), device
            )
        self._results = Results(result, memory, weights)
        self._facts = self._now()

    def holds(self) -> bool:
        """Whether nobody has written to what the graph depends on since it was captured."""
        return self._now() == self._facts

    def check_decisions(self) -> None:
        """Refuse the last replay if its inputs ask for another one. This waits for it, as a plain
        forward waits where it decides, but only if it depends on values at all."""
        self._decisions.check()

    def check(self, inputs: Sequence[Tensor]) -> Answer:
        """Begin to compare the values that the graph was made of with those that are there now, for
        a replay with these inputs; to be read when that is under way."""
        if self._compare is None:
            return unchanged
        self._compare()
        old = [n for n in self._prelude.sources if not self._prelude.is_new(n, inputs[n])]
        return told([*self._compared, *copied((self._memory[n], inputs[n]) for n in old)])

    def forget_inputs(self) -> None:
        """Take the next inputs for new ones, whatever they are."""
        self._prelude.forget()

    def _now(self) -> list[int]:
        return list(map(_version, self._given))

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        stream = self._recorder.stream()
        prelude = False
        for number, (room, given) in enumerate(zip(self._rooms, inputs, strict=True)):
            if stream != self._home:
                room.tensor.record_stream(stream)
            if number in self._prelude.sources:
                if not self._prelude.is_new(number, given):
                    continue
                self._prelude.note(number, given)
                prelude = True
            room.fill(given)
        if prelude and self._replay_prelude is not None:
            self._replay_prelude()
        self._replay()
        return self._results.give(inputs)


_version = attrgetter("_version")


@contextmanager
def recording() -> Iterator[None]:
    """While this lasts, and again after it, `phase` is another one."""
    _running.phase += 1
    try:
        yield
    finally:
        _running.phase += 1


@contextmanager
def _keeping() -> Iterator[tuple[list[Any], list[Tensor]]]:
    kept: list[Any] = []
    given: list[Tensor] = []
    _running.kept, _running.given = kept, given
    try:
        yield kept, given
    finally:
        _running.kept = _running.given = None


@contextmanager
def _autocast_without_cache(device: torch.device) -> Iterator[None]:
    """Weights that autocast has cast and kept die when it is left, but a graph would go on reading
    them: inside a graph it casts anew. Where autocast is off its cache is left alone, for
    torch.compile would compile again."""
    before = torch.is_autocast_cache_enabled()
    if torch.is_autocast_enabled(device.type):
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)

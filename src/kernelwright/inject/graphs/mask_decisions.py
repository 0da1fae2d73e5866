"""Whether attention needs a mask: a graph must decide it as a plain call does.

transformers decides from values: do all positions belong to one sequence, is anything padded? While
a stream is captured it cannot read them and always makes a mask, and attention with a mask gives
other bits than attention without. So the forward that runs before a capture records the decisions,
and the capture repeats them. Those that were read from tensors are taken again after each replay,
from the new values: if one differs, the result of the replay is not used. That waits for the GPU,
which is idle then until the host launches what follows: 0.1 to 0.3 ms on an H200. So what is made
of no input, such as positions that the model counts itself, is found before: see constants.py.

What our own attention reads of a mask is a decision too, where the mask is made of no input: the
graph then neither makes that mask nor waits for it. Other masks are read as everything that a
forward reads on the host, see host_reads.py; what is read here is not part of that.

For this, functions of transformers are wrapped while a forward is recorded or captured; only the
thread that does so is affected, and they are restored afterwards.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..runtime.forwards import MARK
from .buffers import Refusal
from .constants import Constants, Enough
from .host_reads import unwatched

T = TypeVar("T")
MASKING_MODULE = "transformers.masking_utils"
DECIDERS = (
    "find_packed_sequence_indices",
    "_ignore_causal_mask_sdpa",
    "_ignore_bidirectional_mask_sdpa",
)


class _Running(threading.local):
    decisions: Decisions | None = None


_running = _Running()


class Decisions:
    """The decisions of a forward about its masks, in order."""

    def __init__(self) -> None:
        self.collecting = True
        self._constant: list[bool] = []  # of each, whether all replays will take it alike
        self._watched: Constants | None = None
        self._recorded: list[tuple[str, Any]] = []
        self._read_tensors = False
        self._next = 0
        # decisions of the last run that were read from tensors, each with a way to take it again
        self._from_values: list[tuple[Callable[[], Any], Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record this thread's decisions if `collecting`, else repeat them."""
        self._next, self._from_values = 0, []
        masking, outer = sys.modules.get(MASKING_MODULE), _running.decisions
        found = {name: getattr(masking, name, None) for name in DECIDERS}
        own = {n: f for n, f in found.items() if f is not None and not hasattr(f, MARK)}
        for name, function in own.items():
            setattr(masking, name, _wrapped(name, function))
        _running.decisions = self
        try:
            yield
        finally:
            _running.decisions = outer
            for name, function in own.items():
                setattr(masking, name, function)

    def find_constant(self, forward: Callable[[], Any]) -> None:
        """Find out which decisions are made of no input. `forward` runs once more, up to the last
        of them."""
        if not self._read_tensors:
            return
        self._constant = []
        with Constants() as self._watched, suppress(Enough), self.running():
            forward()
        self._watched = None

    @property
    def depend_on_values(self) -> bool:
        return bool(self._from_values)

    def check(self) -> None:
        """Refuse a replay whose values lead to other decisions."""
        for decide, recorded in self._from_values:
            if _kind(decide()) != recorded:
                raise Refusal("its inputs need another attention mask than those at its capture")

    def take(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        only_constant: bool = False,
    ) -> Any:
        """The decision of `function`, or the recorded one; of one that is `only_constant`, that
        only where all replays take it alike."""
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if self.collecting:
            with nullcontext() if only_constant else unwatched():
                result = function(*args, **kwargs)
            self._recorded.append((name, _kind(result)))
            self._read_tensors |= bool(tensors)
            return result
        if self._watched is not None:
            if name != self._recorded[len(self._constant)][0]:
                raise Enough  # it decides otherwise when it is watched
            self._constant.append(self._watched.has(tensors))
            if len(self._constant) == len(self._recorded):
                raise Enough
            return function(*args, **kwargs)
        left = self._recorded[self._next :]
        expected, decision = left[0] if left else ("", None)
        if expected != name:
            raise Refusal("it makes other masks during capture")
        constant = self._next < len(self._constant) and self._constant[self._next]
        self._next += 1
        if only_constant:
            return decision if constant else function(*args, **kwargs)
        if tensors and not constant:
            # copies: later tensors of the graph may reuse the memory of these
            copies = [_copy(a) for a in args]
            named = {key: _copy(a) for key, a in kwargs.items()}
            self._from_values.append((functools.partial(function, *copies, **named), decision))
        with unwatched():
            return function(*args, **kwargs) if decision is Tensor else decision


def decided(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, which reads values on the host and gives no tensor. If the thread captures
    a graph, and they are the same at every replay, that is read before."""
    running = _running.decisions
    if running is None:
        return function(*args)
    decision: T = running.take(function.__name__, function, args, {}, only_constant=True)
    return decision


@functools.cache  # one wrapper per function, so that torch.compile traces it once
def _wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of transformers that goes through this thread's `Decisions`, if there are any."""

    @functools.wraps(function)
    def decide(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _running.decisions is None:
            return function(*args, **kwargs)
        return _running.decisions.take(name, function, args, kwargs)

    setattr(decide, MARK, name)
    return decide


def _kind(decision: Any) -> Any:
    """A decision, or `Tensor` if it is a mask: the graph computes the values of that."""
    return Tensor if isinstance(decision, Tensor) else decision


def _copy(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, Tensor) else argument

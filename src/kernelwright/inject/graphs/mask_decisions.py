"""Whether attention needs a mask: that a graph decides it as a plain call does.

transformers looks at values to find out: do the positions belong to one sequence, is anything
padded. While a stream is captured it does not look and makes a mask, and attention with a mask has
other bits than attention without. So the forward that runs before a capture notes what was decided,
and the capture repeats it. What was read from tensors is decided once more after each replay, from
the values they have then: if that is something else, the result is not used.

For this, functions of transformers are wrapped while a forward is noted or captured, for the thread
that does it; nothing is left of that afterwards.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..runtime.forwards import MARK
from .buffers import Refusal

PLACE = "transformers.masking_utils"
DECIDING = (
    "find_packed_sequence_indices",
    "_ignore_causal_mask_sdpa",
    "_ignore_bidirectional_mask_sdpa",
)


class _Running(threading.local):
    decisions: Decisions | None = None


_running = _Running()


class Decisions:
    """What a forward decides about its masks, in the order in which it does."""

    def __init__(self) -> None:
        self.collecting = True
        self._taken: list[tuple[str, Any]] = []
        self._next = 0
        # decisions of the last run that were read from tensors: how to take them again
        self._open: list[tuple[Callable[[], Any], Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, decisions of this thread are noted; or repeated, once `collecting` is
        over."""
        self._next, self._open = 0, []
        place, around = sys.modules.get(PLACE), _running.decisions
        found = {name: getattr(place, name, None) for name in DECIDING}
        own = {n: f for n, f in found.items() if f is not None and not hasattr(f, MARK)}
        for name, function in own.items():
            setattr(place, name, _deciding(name, function))
        _running.decisions = self
        try:
            yield
        finally:
            _running.decisions = around
            for name, function in own.items():
                setattr(place, name, function)

    @property
    def depend_on_values(self) -> bool:
        return bool(self._open)

    def check(self) -> None:
        """Refuse a replay whose values lead to other decisions."""
        for decide, taken in self._open:
            if _kind(decide()) != taken:
                raise Refusal("its inputs need another attention mask than those it was made with")

    def take(
        self, name: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """What `function` decides, or decided before."""
        if self.collecting:
            result = function(*args, **kwargs)
            self._taken.append((name, _kind(result)))
            return result
        known, taken = self._taken[self._next] if self._next < len(self._taken) else ("", None)
        if known != name:
            raise Refusal("it makes other masks while it is captured")
        self._next += 1
        if any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
            # copies, for the memory of what is used no more serves what comes after it
            kept = [_copy(a) for a in args]
            named = {key: _copy(a) for key, a in kwargs.items()}
            self._open.append((functools.partial(function, *kept, **named), taken))
        return function(*args, **kwargs) if taken is Tensor else taken


@functools.cache  # the same one each time, so that torch.compile traces it once
def _deciding(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of transformers that asks the decisions of its thread, where there are any."""

    @functools.wraps(function)
    def decide(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _running.decisions is None:
            return function(*args, **kwargs)
        return _running.decisions.take(name, function, args, kwargs)

    setattr(decide, MARK, name)
    return decide


def _kind(decision: Any) -> Any:
    """A decision, but for a tensor only that it is one: its values are computed in the graph."""
    return Tensor if isinstance(decision, Tensor) else decision


def _copy(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, Tensor) else argument

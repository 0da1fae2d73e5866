"""Rows that are there in eight bits already.

Layers that are given the same tensor one after the other, such as query, key and value, share its
eight-bit rows. A norm can make them in its own pass and lay them beside the tensor it returns: it
does so once somebody has wanted what it made in eight bits, and no more if nobody took it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from ...ops import fp8
from ...ops.op import Op
from ..graphs.capture import capturing, phase
from ..runtime.sites import current

Rows = tuple[Tensor, Tensor]
# modules whose rows are wanted in eight bits, and whether they have made them so
Known = WeakKeyDictionary[nn.Module, bool]
# a block of SD3.5 lays three ready while those it was given itself still live
MOST = 8


@dataclass(eq=False)
class _Laid:
    """The eight-bit rows of a tensor. `rows` is None as long as nobody has asked; `maker` is what
    made the tensor, if it can make them too, and is then one of `known`."""

    source: ref[Tensor]
    facts: tuple[int, int]
    rows: Rows | None
    maker: nn.Module | None = None
    known: Known | None = None
    taken: bool = False

    def take(self, x: Tensor) -> Rows:
        self.taken = True
        if self.rows is None:
            self.rows = fp8.quantize(x)
            if self.maker is not None and self.known is not None:
                self.known.setdefault(self.maker, False)
        return self.rows

    def left(self) -> None:
        """Nobody can take it any more."""
        wasted = self.rows is not None and not self.taken
        if wasted and self.maker is not None and self.known is not None:
            self.known.pop(self.maker, None)


class _Here(threading.local):
    """What lies ready in this thread, by the id of its tensor, oldest first."""

    def __init__(self) -> None:
        self.laid: dict[int, _Laid] = {}


_here = _Here()


def rows_of(x: Tensor) -> Rows:
    """x in eight bits, and the scale of each row."""
    if x.is_inference():  # such tensors do not count who writes to them
        return fp8.quantize(x)
    laid = _here.laid.get(id(x))
    if laid is None or laid.source() is not x or laid.facts != _facts(x):
        laid = _lay(x, None)
    return laid.take(x)


class Makers:
    """The modules of one injection before which a tensor is read in eight bits."""

    def __init__(self) -> None:
        self._known: Known = WeakKeyDictionary()

    def __call__(self, maker: nn.Module, op: Op, *args: Any, backend: str | None) -> Any:
        """What an op of `fp8.rows` makes: its first result is what layers will be given. `maker` is
        the module that this is a part of or that reads it, always the same."""
        wanted = current.eight_bits and self._is_wanted(maker)
        *made, rows, scale = op.run(*args, wanted, backend=backend)
        if current.eight_bits and not made[0].is_inference():
            _lay(made[0], (rows, scale) if wanted else None, maker, self._known)
        return made[0] if len(made) == 1 else tuple(made)

    def _is_wanted(self, maker: nn.Module) -> bool:
        has_made = self._known.get(maker)
        if has_made is None or capturing():
            return bool(has_made)  # a capture does only what was done before: all of it is built
        self._known[maker] = True
        return True


def _facts(x: Tensor) -> tuple[int, int]:
    return x._version, phase()


def _lay(
    x: Tensor,
    rows: Rows | None,
    maker: nn.Module | None = None,
    known: Known | None = None,
) -> _Laid:
    laid, key = _here.laid, id(x)

    def gone(_: Any) -> None:
        if (there := laid.pop(key, None)) is not None:
            there.left()

    gone(None)
    facts = _facts(x)
    # what was made in another phase is of no more use, and may be the memory of a graph
    for old in [k for k, there in laid.items() if there.facts[1] != facts[1]]:
        laid.pop(old)
    while len(laid) >= MOST:
        laid.pop(next(iter(laid))).left()
    laid[key] = _Laid(ref(x, gone), facts, rows, maker, known)
    return laid[key]

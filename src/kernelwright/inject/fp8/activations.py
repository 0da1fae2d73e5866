"""Activations that are quantised once, or by the op that made them.

Layers that are given the same tensor one after the other, such as query, key and value, share its
quantised rows. A norm can quantise in its own pass and keep the rows beside the tensor it returns:
it does so once a layer has asked for its result in fp8, and stops if nobody used them.
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
from ..runtime.sites import mode

Rows = tuple[Tensor, Tensor]
# modules whose result a layer reads in fp8, and whether they have quantised it themselves yet
Known = WeakKeyDictionary[nn.Module, bool]
# a block of SD3.5 quantises three tensors while those it was given are still alive
MAX_KEPT = 8


@dataclass(eq=False)
class _Rows:
    """The quantised rows of a tensor. `rows` is None until somebody asks; `maker` is the module
    that made the tensor, if it can quantise too, and is then one of `known`."""

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

    def drop(self) -> None:
        """Nobody can ask for it any more; a maker that quantised in vain need not again."""
        wasted = self.rows is not None and not self.taken
        if wasted and self.maker is not None and self.known is not None:
            self.known.pop(self.maker, None)


class _Here(threading.local):
    """The quantised rows of this thread, by the id of their tensor, oldest first."""

    def __init__(self) -> None:
        self.kept: dict[int, _Rows] = {}


_here = _Here()


def rows_of(x: Tensor) -> Rows:
    """x in fp8, and the scale of each row."""
    if x.is_inference():  # such tensors have no version counter
        return fp8.quantize(x)
    found = _here.kept.get(id(x))
    if found is None or found.source() is not x or found.facts != _facts(x):
        found = _keep(x, None)
    return found.take(x)


def keep_rows(x: Tensor, rows: Rows) -> None:
    """Have `rows_of` find these rows of x."""
    if not x.is_inference():
        _keep(x, rows)


class Makers:
    """The modules of one injection whose results are read in fp8."""

    def __init__(self) -> None:
        self._known: Known = WeakKeyDictionary()

    def __call__(self, maker: nn.Module, op: Op, *args: Any, backend: str | None) -> Any:
        """Run an op of `fp8.rows`; its first result is what layers will be given. `maker` is the
        module that this op is a part of or that reads it, the same at every call."""
        wanted = mode.fp8 and self._is_wanted(maker)
        *made, rows, scale = op.run(*args, wanted, backend=backend)
        if mode.fp8 and not made[0].is_inference():
            _keep(made[0], (rows, scale) if wanted else None, maker, self._known)
        return made[0] if len(made) == 1 else tuple(made)

    def _is_wanted(self, maker: nn.Module) -> bool:
        has_made = self._known.get(maker)
        if has_made is None or capturing():
            return bool(has_made)  # nothing new in a capture: its kernel would have to be compiled
        self._known[maker] = True
        return True


def _facts(x: Tensor) -> tuple[int, int]:
    return x._version, phase()


def _keep(
    x: Tensor,
    rows: Rows | None,
    maker: nn.Module | None = None,
    known: Known | None = None,
) -> _Rows:
    kept, key = _here.kept, id(x)

    def gone(_: Any) -> None:
        if (there := kept.pop(key, None)) is not None:
            there.drop()

    gone(None)
    facts = _facts(x)
    # rows of another phase (before, during or after a capture) may lie in the memory of a graph
    for old in [k for k, there in kept.items() if there.facts[1] != facts[1]]:
        kept.pop(old)
    while len(kept) >= MAX_KEPT:
        kept.pop(next(iter(kept))).drop()
    kept[key] = _Rows(ref(x, gone), facts, rows, maker, known)
    return kept[key]

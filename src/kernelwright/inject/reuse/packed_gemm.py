"""Several products of one input as one, and whether that keeps the bits.

A graph of torch.compile holds a single op for them, which finds out when it runs how to do it: one
trace serves all blocks of a model, and it is no matter whether their weights lie side by side yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import library, selection
from ...ops.linear import algorithms
from ..runtime.sites import equal, tells
from . import packed_weights
from .packed_weights import Packed

# a service that sees ever new shapes starts over rather than grow
SHAPES = 1024
Product = Callable[[], Tensor]


def one(x: Tensor, packed: Packed) -> Tensor:
    """x @ [w_0, w_1, ...].T, with their biases: the bits of F.linear."""
    return algorithms.linear(x, packed.weight, packed.bias)


def apart(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """The product of each layer alone."""
    if not biases:
        return [F.linear(x, w) for w in weights]
    return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


class SameBits:
    """Where other ways to multiply were found to keep the bits of the layers, or not."""

    _numbers = count(1)
    _all: ClassVar[WeakValueDictionary[int, SameBits]] = WeakValueDictionary()

    def __init__(self) -> None:
        self.known: dict[Any, bool] = {}
        self.number = next(self._numbers)  # by which a graph of torch.compile knows it
        self._all[self.number] = self

    @classmethod
    def of(cls, number: int) -> SameBits:
        """The one of this number; a graph that has outlived its own gets one for all such."""
        return cls._all.get(number, _outlived)

    def __call__(
        self,
        way: str,
        x: Tensor,
        sizes: Sequence[int],
        bias: bool,
        ours: Callable[[], Any],
        eager: Callable[[], Any],
    ) -> bool:
        """Whether `ours()` and `eager()` give the same bits at such shapes: found out once."""
        known = self.known.get(key := _key(way, x, sizes, bias))
        if known is None:
            if packed_weights.not_now(x.device):
                return False
            if len(self.known) >= SHAPES:
                self.known.clear()
            expected = eager()
            known = equal(ours(), expected)
            if not tells(x, *(expected if isinstance(expected, tuple) else (expected,))):
                return False  # zeros and NaN prove nothing
            self.known[key] = known
        return known

    def has_seen(self, way: str, x: Tensor, sizes: Sequence[int], bias: bool) -> bool:
        """Whether such a way was found to give the same bits before."""
        return self.known.get(_key(way, x, sizes, bias), False)


def _key(way: str, x: Tensor, sizes: Sequence[int], bias: bool) -> Any:
    layout = x.shape, x.stride(), x.dtype, x.device
    return way, layout, tuple(sizes), bias, algorithms.settings()


_outlived = SameBits()


def _joined(x: Tensor, weights: list[Tensor], biases: list[Tensor], exact: int) -> Tensor:
    """The products of all weights beside each other: [..., sum of outputs]. `exact` is the number
    of a `SameBits`, or 0."""
    with nullcontext() if not torch.is_grad_enabled() else torch.no_grad():
        packed = packed_weights.packed_weights(weights, biases, x)
        same_bits = SameBits.of(exact) if exact else None
        if type(packed) is Packed and (
            same_bits is None or same_bits.has_seen("one", x, packed.sizes, bool(biases))
        ):
            return one(x, packed)
        return _first_joined(x, weights, biases, packed, same_bits)


def _first_joined(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    packed: Packed | str,
    same_bits: SameBits | None,
) -> Tensor:
    """The same where it is not known that one product will do."""

    def layers() -> Tensor:
        return torch.cat(apart(x, weights, biases), -1)

    sizes = [len(w) for w in weights]
    ways: dict[str, Product] = {"into": lambda: _into(x, weights, biases)}
    if isinstance(packed, Packed):
        ways = {"one": lambda: one(x, packed), **ways}
    for name, way in ways.items():
        if same_bits is None or same_bits(name, x, sizes, bool(biases), way, layers):
            return way()
    return layers()


def _into(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Each product by itself, written where it belongs."""
    y = _room(x, weights)
    rows, parts = x.flatten(0, -2), y.flatten(0, -2).split([len(w) for w in weights], -1)
    for i, (w, part) in enumerate(zip(weights, parts, strict=True)):
        if biases:
            torch.addmm(biases[i], rows, w.t(), out=part)
        else:
            torch.mm(rows, w.t(), out=part)
    return y


def _room(x: Tensor, weights: Sequence[Tensor], *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(len(w) for w in weights)))


JOINED = library.define_unrecorded(
    "projections",
    "(Tensor x, Tensor[] weights, Tensor[] biases, int exact) -> Tensor",
    _joined,
    _room,
)


@selection.given
def chooses(kind: str, index: int | None) -> bool:
    """Whether products on this device may go another way than PyTorch's."""
    return kind == "cuda" and algorithms.serves(torch.device(kind, index or 0))


CHOSEN = library.define_unrecorded(
    "product",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    algorithms.linear,
    lambda x, weight, bias: _room(x, [weight]),
)

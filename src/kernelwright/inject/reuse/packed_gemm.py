"""Linear layers that share an input as one GEMM, and whether that keeps the bits.

Under torch.compile they are a single op, which decides when it runs: so all blocks of a model share
one trace, whether or not their weights are packed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...backends.torch_internals import gemm_switches, mark_constant
from ...ops import library
from ...ops.linear import algorithms
from ...ops.linear.plain import separate_linears
from ..runtime.informative import informative
from ..runtime.sites import equal
from . import packed_weights
from .packed_weights import Packed

# bounds memory where shapes never repeat: start over
SHAPES = 1024
Linears = Callable[[], Tensor]


def packed_linear(x: Tensor, packed: Packed) -> Tensor:
    """x @ [w_0, w_1, ...].T + biases, with the bits of F.linear."""
    return algorithms.linear(x, packed.weight, packed.bias)


class SameBits:
    """For which shapes other ways to compute the layers gave the same bits."""

    _ids = count(1)
    _all: ClassVar[WeakValueDictionary[int, SameBits]] = WeakValueDictionary()

    def __init__(self) -> None:
        self.known: dict[Any, bool] = {}
        self.id = next(self._ids)  # a constant in compiled graphs
        self._all[self.id] = self

    @classmethod
    def by_id(cls, wanted: int) -> SameBits:
        """Look up by id; a compiled graph that outlived its injection shares an empty instance."""
        return cls._all.get(wanted, _of_expired)

    def __call__(
        self,
        way: str,
        x: Tensor,
        sizes: Sequence[int],
        bias: bool,
        ours: Callable[[], Any],
        eager: Callable[[], Any],
    ) -> bool:
        """Whether `ours()` and `eager()` give the same bits at this shape: compared once."""
        known = self.known.get(key := _key(way, x, sizes, bias))
        if known is None:
            if packed_weights.why_not_now(x.device):
                return False
            if len(self.known) >= SHAPES:
                self.known.clear()
            expected = eager()
            known = equal(ours(), expected)
            if not informative(x, *(expected if isinstance(expected, tuple) else (expected,))):
                return False  # zeros and NaN prove nothing
            self.known[key] = known
        return known

    def is_known(self, way: str, x: Tensor, sizes: Sequence[int], bias: bool) -> bool:
        """Whether this way is known to give the same bits."""
        return self.known.get(_key(way, x, sizes, bias), False)


def _key(way: str, x: Tensor, sizes: Sequence[int], bias: bool) -> Any:
    layout = x.shape, x.stride(), x.dtype, x.device
    return way, layout, tuple(sizes), bias, gemm_switches()


_of_expired = SameBits()


def projections(x: Tensor, weights: list[Tensor], biases: list[Tensor], exact: int) -> Tensor:
    """x @ w.T + b of all layers, concatenated: [..., sum of outputs]. `exact` is the id of a
    `SameBits`, or 0."""
    with nullcontext() if not torch.is_grad_enabled() else torch.no_grad():
        packed = packed_weights.packed_weights(weights, biases, x)
        same_bits = SameBits.by_id(exact) if exact else None
        if type(packed) is Packed and (
            same_bits is None or same_bits.is_known("one", x, packed.sizes, bool(biases))
        ):
            return packed_linear(x, packed)
        return _first_projections(x, weights, biases, packed, same_bits)


def _first_projections(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    packed: Packed | str,
    same_bits: SameBits | None,
) -> Tensor:
    """The same, before one GEMM is known to give the same bits: try it, then GEMMs with `out=`."""

    def layers() -> Tensor:
        return torch.cat(separate_linears(x, weights, biases), -1)

    sizes = [len(w) for w in weights]
    ways: dict[str, Linears] = {"into": lambda: _into(x, weights, biases)}
    if isinstance(packed, Packed):
        ways = {"one": lambda: packed_linear(x, packed), **ways}
    for name, way in ways.items():
        if same_bits is None or same_bits(name, x, sizes, bool(biases), way, layers):
            return way()
    return layers()


def _into(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """One GEMM for each layer, written into its columns of the result."""
    y = _empty_output(x, weights)
    rows, parts = x.flatten(0, -2), y.flatten(0, -2).split([len(w) for w in weights], -1)
    for i, (w, part) in enumerate(zip(weights, parts, strict=True)):
        if biases:
            torch.addmm(biases[i], rows, w.t(), out=part)
        else:
            torch.mm(rows, w.t(), out=part)
    return y


def _empty_output(x: Tensor, weights: Sequence[Tensor], *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(len(w) for w in weights)))


PROJECTIONS = library.define_unrecorded(
    "projections",
    "(Tensor x, Tensor[] weights, Tensor[] biases, int exact) -> Tensor",
    projections,
    _empty_output,
)


@mark_constant
def is_tuned(kind: str, index: int | None) -> bool:
    """Whether GEMM algorithms are timed and chosen on this device."""
    return kind == "cuda" and algorithms.serves(torch.device(kind, index or 0))


TUNED_LINEAR = library.define_unrecorded(
    "product",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    algorithms.linear,
    lambda x, weight, bias: _empty_output(x, [weight]),
)

"""Several linear layers of one input as one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from .. import packing
from ..check import declined, equal, site
from ..packing import Packed
from ..slots import hooked
from .places import Places

QKV = "QKV in one product"
TEXT_QKV = "QKV of the text in one product"
GATE_UP = "gate and up in one product"
OTHER_BITS = "it sums in another order than its layers alone"
# a service that sees ever new shapes starts over rather than grow
SHAPES = 1024


class ProjectionPlaces(Places):
    def projections(self, name: str, x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...]:
        """layer(x) of each layer: views of one product, whose rows lie as far apart as all of them
        are wide. Exact only where cuBLAS sums that product as it sums those of the layers alone,
        which is found out once for each shape."""

        def eager() -> tuple[Tensor, ...]:
            return tuple([layer(x) for layer in layers])

        if torch.compiler.is_compiling():
            return eager()
        if self.eight_bits is not None:
            eight = None if _watched() else self.eight_bits.together(layers, x)
            return eager() if eight is None else eight
        if not _may_go_around(layers):
            declined(name, "an adapter or a hook is on one of its layers")
            return eager()
        packed = packing.packed(layers, x)
        if isinstance(packed, str):
            declined(name, packed)
            return eager()

        def kernel() -> tuple[Tensor, ...]:
            y = F.linear(x, packed.weight, packed.bias)
            return y.split_with_sizes(packed.sizes, -1)

        if self.exact and not self._same(x, packed, eager, kernel):
            declined(name, OTHER_BITS)
            return eager()
        return site(name, eager, kernel)

    def _same(self, x: Tensor, packed: Packed, eager: Any, kernel: Any) -> bool:
        """Whether both ways give the same bits at this shape."""
        key = x.shape, x.stride(), x.dtype, x.device, packed.sizes, packed.bias is None
        known = self.same_bits.get(key)
        if known is None:
            if packing.not_now(x.device):
                return False
            if len(self.same_bits) >= SHAPES:
                self.same_bits.clear()
            known = self.same_bits[key] = equal(kernel(), eager())
        return known


def _may_go_around(layers: Sequence[Any]) -> bool:
    """Whether nothing stands around these layers that their weights do not tell."""
    for layer in layers:
        if type(layer) is not nn.Linear or "forward" in vars(layer) or hooked(layer):
            return False
    return not _watched()


def _watched() -> bool:
    """Whether a hook wants to see all modules being called."""
    return bool(global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks)

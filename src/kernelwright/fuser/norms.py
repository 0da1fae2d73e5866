"""Norms and their gradients as nodes of a recorded graph, and which of them programs can make.

ATen's norms return, beside the normalised tensor, statistics of each row, which their gradients
read: the mean and the reciprocal of the deviation, or of the root mean square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .recorded_ops import RMS_NORM
from .views import packet, shape_of

aten: Any = torch.ops.aten
MEAN, SCALE = "mean", "scale"  # statistics, by their names in norms.cuh

LAYER_NORM = aten.native_layer_norm
# of older PyTorch, F.rms_norm is several ops
FUSED_RMS_NORM = getattr(aten, "_fused_rms_norm", None)
# the results of a norm after the first
STATISTICS: dict[Any, tuple[str, ...]] = {LAYER_NORM: (MEAN, SCALE), FUSED_RMS_NORM: (SCALE,)}
RMS_NORMS = (RMS_NORM, getattr(FUSED_RMS_NORM, "default", RMS_NORM))


def layer_norm_gradient(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shape: list[int], weight: Any
) -> Tensor:
    """The gradient of x in F.layer_norm(x, shape, weight)."""
    mask = [True, False, False]
    given = gradient, x, shape, mean, scale, weight, None, mask
    result: Tensor = aten.native_layer_norm_backward(*given)[0]
    return result


def rms_norm_gradient(
    gradient: Tensor, x: Tensor, scale: Tensor, shape: list[int], weight: Any
) -> Tensor:
    """The gradient of x in F.rms_norm(x, shape, weight)."""
    mask = [True, False]
    result: Tensor = aten._fused_rms_norm_backward(gradient, x, shape, scale, weight, mask)[0]
    return result


NORM_GRADIENTS: dict[Any, Callable[..., Tensor]] = {
    aten.native_layer_norm_backward: layer_norm_gradient,
    getattr(aten, "_fused_rms_norm_backward", None): rms_norm_gradient,
}


@dataclass(frozen=True)
class Gradient:
    """The operands of a node that finds the gradient of a norm's input."""

    op: Callable[..., Tensor]
    gradient: fx.Node
    x: fx.Node
    shape: list[int]
    statistics: tuple[fx.Node, ...]
    weight: fx.Node | None

    @staticmethod
    def of(node: fx.Node) -> Gradient:
        op = NORM_GRADIENTS[packet(node)]
        gradient, x, shape, *statistics, weight = node.args[: 6 if op is layer_norm_gradient else 5]
        return Gradient(op, gradient, x, shape, tuple(statistics), weight)


def is_norm(node: fx.Node) -> bool:
    """Whether a node is a norm, or the gradient of one."""
    kind = packet(node)
    return node.target is RMS_NORM or kind in STATISTICS or kind in NORM_GRADIENTS


def can_be_computed(node: fx.Node) -> bool:
    """Whether programs can make those results of a norm with several that the graph reads: a norm
    along the last dimension; of its gradients that of its input, if all is of one dtype."""
    kind, read = packet(node), [user.args[1] for user in node.users if is_getitem(user)]
    if len(read) < len(node.users):
        return False
    if kind in STATISTICS:
        return len(node.args[1]) == 1
    if kind not in NORM_GRADIENTS or any(read):
        return False
    of = Gradient.of(node)
    operands = (of.gradient, of.x, *((of.weight,) if of.weight else ()))
    same = len({n.meta["val"].dtype for n in operands}) == 1
    return same and len(of.shape) == 1 and shape_of(of.gradient) == shape_of(of.x)


def is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"

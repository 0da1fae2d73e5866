"""What the tiers that round differently promise: an error not above eager's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .slots import hooked

MARGIN = 1.05  # how much above eager's an error may lie
# a float32 model has no wider run to be held against: parts of it compute in float32 anyway
FLOAT32_ERROR = 1e-5
PIECE = 2**23


def errors(
    module: nn.Module,
    eager: Callable[..., Any],
    args: Any,
    kwargs: Any,
    result: Any,
    expected: Any,
    eagerly: Callable[[], Any],
) -> dict[str, float]:
    """The errors of `result` and of eager's `expected` against a float32 run of the same weights;
    none of them if the weights are not here to be widened."""
    if not _here(module):
        return {}
    device = next((t.device.type for t in _tensors(expected)), "cpu")

    def both() -> dict[str, float]:
        wide = widened((args, kwargs))
        twin = copy.deepcopy(module).float()
        truth = eager(twin, *wide[0], **wide[1])
        return {"error": error(result, truth), "eager_error": error(expected, truth)}

    with torch.no_grad(), eagerly(), torch.autocast(device, enabled=False):
        found = both()
    if device == "cuda":
        # the float32 run was larger than any that comes after it: leave nothing of it in reserve
        torch.cuda.empty_cache()
    return found


def holds(rows: int, error: float | None = None, eager_error: float | None = None) -> bool:
    """Whether the promise is kept, as far as so many rows can tell: two equally good roundings of
    n rows err alike only to about 1 / sqrt(n)."""
    if error is None or eager_error is None:
        return True
    return error <= max(MARGIN * (1 + rows**-0.5) * eager_error, FLOAT32_ERROR)


def rows(result: Any) -> int:
    return max(1, sum(t.numel() // max(1, t.shape[-1]) for t in _tensors(result) if t.ndim))


def error(result: Any, truth: Any) -> float:
    """‖result − truth‖ / ‖truth‖ over all tensors of a result."""
    off = size = 0.0
    for y, t in zip(_tensors(result), _tensors(truth), strict=True):
        squares = [
            torch.stack([(a.double() - b.double()).square().sum(), b.double().square().sum()])
            for a, b in zip(_pieces(y), _pieces(t), strict=True)
        ]
        more = torch.stack(squares).sum(0).tolist() if squares else (0.0, 0.0)
        off, size = off + more[0], size + more[1]
    return (off / size) ** 0.5 if size else off**0.5


def _pieces(t: Tensor) -> tuple[Tensor, ...]:
    """A tensor in pieces of up to PIECE elements, or of a row: in float64 the whole of it would
    take four times its memory, and it is compared while the model runs."""
    rows = t.reshape(-1, t.shape[-1]) if t.ndim and t.numel() else t.reshape(-1, 1)
    return rows.split(max(1, PIECE // rows.shape[1]))


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def widened(tree: Any) -> Any:
    """The same inputs with every floating tensor in float32."""
    return pytree.tree_map(
        lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t, tree
    )


def _here(module: nn.Module) -> bool:
    return not any(hooked(m) for m in module.modules()) and not any(
        p.is_meta for p in module.parameters()
    )

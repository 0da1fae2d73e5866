"""The promise of the tiers that round differently: an error not above eager's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.torch_internals import pytree
from ..runtime.forwards import hooked
from .float32_run import Float32Run, widened

__all__ = ["Unchecked", "error", "errors", "holds", "rows", "widened"]

MARGIN = 1.05  # an error may be this many times eager's
# a float32 model has no wider run to compare with: parts of it compute in float32 anyway
FLOAT32_ERROR = 1e-5
PIECE = 2**23  # elements compared at a time
SAMPLES = 2**21  # elements of the samples that run together: fewer would save little memory
NO_MEMORY = "not enough memory for a float32 run"
Squares = tuple[float, float]


class Unchecked(Exception):
    """Raised with the reason why a module was not compared with a float32 run."""


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
    empty if the weights cannot be widened (hooks, meta). Raises Unchecked if that run fails."""
    if not _can_widen(module):
        return {}
    device = next((t.device.type for t in _tensors(expected)), "cpu")
    found: dict[str, float] = {}
    why = None
    try:
        with torch.no_grad(), eagerly():
            found = _measured(Float32Run(module, eager, device), args, kwargs, result, expected)
    except torch.OutOfMemoryError:
        why = NO_MEMORY
    except Exception as no:
        why = f"it does not run in float32 ({type(no).__name__}: {str(no).partition(chr(10))[0]})"
    if device == "cuda":
        # the float32 run needs more than any later one: return its memory to the GPU
        torch.cuda.empty_cache()
    if why is not None:  # outside `except`, whose traceback keeps the tensors of the failed run
        raise Unchecked(why)
    return found


def _measured(
    reference: Float32Run, args: Any, kwargs: Any, result: Any, expected: Any
) -> dict[str, float]:
    try:
        sums = _by_samples(reference, args, kwargs, result, expected)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it does not run on a part of the batch
        sums = None
    if sums is None:
        true = reference(args, kwargs)
        sums = _squares(result, true), _squares(expected, true)
    return {"error": _root(*sums[0]), "eager_error": _root(*sums[1])}


def _by_samples(
    reference: Float32Run, args: Any, kwargs: Any, result: Any, expected: Any
) -> tuple[Squares, Squares] | None:
    """The squares of both errors, from float32 runs of a few samples at a time: the whole batch
    needs twice eager's memory. None if the batch is small, or if the module mixes samples.

    It does not mix them if eager has the same error with and without the rest of the batch, against
    a float32 run of the same samples."""
    batch, elements = _batch(expected)
    together = -(-SAMPLES * batch // max(1, elements))
    if together >= batch:
        return None
    sums = torch.zeros(3, 2, dtype=torch.float64)
    for first in range(0, batch, together):
        cut = partial(_samples, range(batch)[first : first + together], batch)
        sums += torch.tensor(_of_samples(reference, *map(cut, (args, kwargs, result, expected))))
    ours, eagers, alone = sums.tolist()
    if not holds(rows(expected), _root(*eagers), _root(*alone)):
        return None
    return ours, eagers


def _of_samples(
    reference: Float32Run, args: Any, kwargs: Any, result: Any, expected: Any
) -> list[Squares]:
    """The squares of both errors on some samples, and of eager's when run on these alone."""
    true = reference(args, kwargs)
    if [t.shape for t in _tensors(true)] != [t.shape for t in _tensors(expected)]:
        raise ValueError("samples run alone give another shape")
    alone = reference.eager(reference.module, *args, **kwargs)
    return [_squares(y, true) for y in (result, expected, alone)]


def _batch(result: Any) -> tuple[int, int]:
    """The number of samples in a result (1 if unknown), and of elements."""
    tensors = _tensors(result)
    sizes = {t.shape[0] if t.ndim else 1 for t in tensors}
    return sizes.pop() if len(sizes) == 1 else 1, sum(t.numel() for t in tensors)


def _samples(some: range, batch: int, tree: Any) -> Any:
    """A tree with every tensor that has one row per sample cut to `some` samples."""

    def cut(value: Any) -> Any:
        batched = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch
        return value[some.start : some.stop] if batched else value

    return pytree.tree_map(cut, tree)


def holds(rows: int, error: float | None = None, eager_error: float | None = None) -> bool:
    """Whether an error is not above eager's, as far as so many rows can show: the errors of two
    equally good roundings of n rows agree only to about 1 / sqrt(n)."""
    if error is None or eager_error is None:
        return True
    return error <= max(MARGIN * (1 + rows**-0.5) * eager_error, FLOAT32_ERROR)


def rows(result: Any) -> int:
    return max(1, sum(t.numel() // max(1, t.shape[-1]) for t in _tensors(result) if t.ndim))


def error(result: Any, truth: Any) -> float:
    """‖result − truth‖ / ‖truth‖ over all tensors of a result."""
    return _root(*_squares(result, truth))


def _squares(result: Any, truth: Any) -> Squares:
    """‖result − truth‖² and ‖truth‖²"""
    off = size = 0.0
    for y, t in zip(_tensors(result), _tensors(truth), strict=True):
        squares = [
            torch.stack([(a.double() - b.double()).square().sum(), b.double().square().sum()])
            for a, b in zip(_pieces(y), _pieces(t), strict=True)
        ]
        more = torch.stack(squares).sum(0).tolist() if squares else (0.0, 0.0)
        off, size = off + more[0], size + more[1]
    return off, size


def _root(off: float, size: float) -> float:
    return (off / size) ** 0.5 if size else off**0.5


def _pieces(t: Tensor) -> tuple[Tensor, ...]:
    """A tensor in pieces of whole rows, up to PIECE elements if a row allows: all of it in float64
    would take four times its memory while the model runs."""
    rows = t.reshape(-1, t.shape[-1]) if t.ndim and t.numel() else t.reshape(-1, 1)
    return rows.split(max(1, PIECE // rows.shape[1]))


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def _can_widen(module: nn.Module) -> bool:
    return not any(hooked(m) for m in module.modules()) and not any(
        p.is_meta for p in module.parameters()
    )

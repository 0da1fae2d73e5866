"""What the tiers that round differently promise: an error not above eager's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...backends.torch_internals import pytree
from ..runtime.forwards import hooked
from .float32_run import Truth, widened

__all__ = ["Unchecked", "error", "errors", "holds", "rows", "widened"]

MARGIN = 1.05  # how much above eager's an error may lie
# a float32 model has no wider run to be held against: parts of it compute in float32 anyway
FLOAT32_ERROR = 1e-5
PIECE = 2**23
SAMPLES = 2**21  # samples with so many elements are run together: what fewer need is little
NO_MEMORY = "there was no memory for a float32 run"
Squares = tuple[float, float]


class Unchecked(Exception):
    """Why a module was not held against a float32 run."""


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
    none of them if the weights are not here to be widened. Raises Unchecked if that run fails."""
    if not _here(module):
        return {}
    device = next((t.device.type for t in _tensors(expected)), "cpu")
    found: dict[str, float] = {}
    why = None
    try:
        with torch.no_grad(), eagerly():
            found = _measured(Truth(module, eager, device), args, kwargs, result, expected)
    except torch.OutOfMemoryError:
        why = NO_MEMORY
    except Exception as no:
        why = f"it does not run in float32 ({type(no).__name__}: {str(no).partition(chr(10))[0]})"
    if device == "cuda":
        # the float32 run was larger than any that comes after it: leave nothing of it in reserve
        torch.cuda.empty_cache()
    if why is not None:  # not where it was caught: that would keep the tensors of the failed run
        raise Unchecked(why)
    return found


def _measured(truth: Truth, args: Any, kwargs: Any, result: Any, expected: Any) -> dict[str, float]:
    try:
        sums = _by_samples(truth, args, kwargs, result, expected)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it cannot be given fewer samples than it was
        sums = None
    if sums is None:
        true = truth(args, kwargs)
        sums = _squares(result, true), _squares(expected, true)
    return {"error": _root(*sums[0]), "eager_error": _root(*sums[1])}


def _by_samples(
    truth: Truth, args: Any, kwargs: Any, result: Any, expected: Any
) -> tuple[Squares, Squares] | None:
    """The squares of both errors, from float32 runs of few samples at a time: a batch of them needs
    twice the memory of eager's. None if they are few, or if the module mixes samples.

    Whether it does is asked of eager: if each sample comes out alike alone and among the others,
    then both have the same error against a float32 run of that sample alone."""
    batch, elements = _batch(expected)
    together = -(-SAMPLES * batch // max(1, elements))
    if together >= batch:
        return None
    sums = torch.zeros(3, 2, dtype=torch.float64)
    for first in range(0, batch, together):
        some = partial(_samples, range(batch)[first : first + together], batch)
        sums += torch.tensor(_of_some(truth, *map(some, (args, kwargs, result, expected))))
    ours, eagers, alone = sums.tolist()
    if not holds(rows(expected), _root(*eagers), _root(*alone)):
        return None
    return ours, eagers


def _of_some(truth: Truth, args: Any, kwargs: Any, result: Any, expected: Any) -> list[Squares]:
    """The squares of the errors of both, and of eager when it is given these samples alone."""
    true = truth(args, kwargs)
    if [t.shape for t in _tensors(true)] != [t.shape for t in _tensors(expected)]:
        raise ValueError("samples alone come out in another shape")
    alone = truth.eager(truth.module, *args, **kwargs)
    return [_squares(y, true) for y in (result, expected, alone)]


def _batch(result: Any) -> tuple[int, int]:
    """How many samples a result has, 1 if that cannot be told, and how many elements."""
    tensors = _tensors(result)
    sizes = {t.shape[0] if t.ndim else 1 for t in tensors}
    return sizes.pop() if len(sizes) == 1 else 1, sum(t.numel() for t in tensors)


def _samples(some: range, batch: int, tree: Any) -> Any:
    """Some samples of everything in a tree that has one row for each sample of the batch."""

    def cut(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch
        return value[some.start : some.stop] if whole else value

    return pytree.tree_map(cut, tree)


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
    """A tensor in pieces of up to PIECE elements, or of a row: in float64 the whole of it would
    take four times its memory, and it is compared while the model runs."""
    rows = t.reshape(-1, t.shape[-1]) if t.ndim and t.numel() else t.reshape(-1, 1)
    return rows.split(max(1, PIECE // rows.shape[1]))


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def _here(module: nn.Module) -> bool:
    return not any(hooked(m) for m in module.modules()) and not any(
        p.is_meta for p in module.parameters()
    )

"""Gradients of norms, as generated kernels compute them: a program of one, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..fuser.expression import Load, Row
from ..fuser.index import Affine
from ..fuser.launching import Kernels
from ..fuser.norms import FUSED_RMS_NORM, LAYER_NORM, layer_norm_gradient, rms_norm_gradient
from ..fuser.program import Program, Store
from ..ops.case import Inputs

EPS = 1e-6
# by subject: the gradient, and the norm with its statistics
GRADIENTS: dict[str, tuple[Any, Any]] = {
    "the gradient of F.rms_norm": (rms_norm_gradient, FUSED_RMS_NORM),
    "the gradient of F.layer_norm": (layer_norm_gradient, LAYER_NORM),
}


def operands(
    subject: str, rows: int, width: int, dtype: torch.dtype, device: str
) -> Iterator[dict[str, Tensor]]:
    """The operands of a gradient by their names, with and without a weight."""
    _, norm = GRADIENTS[subject]
    for seed, weighted in ((0, True), (1, False)):
        inputs = Inputs(dtype, device, seed)
        gradient, x = (inputs.normal(rows, width) for _ in range(2))
        weight = inputs.weight(width) if weighted else None
        scales = (weight, None) if norm is LAYER_NORM else (weight,)
        _, *statistics = norm(x, [width], *scales, EPS)
        names = ("mean", "scale")[-len(statistics) :]
        given = {"gradient": gradient, "x": x, **dict(zip(names, statistics, strict=True))}
        yield given if weight is None else {**given, "weight": weight}


def expected(subject: str, given: dict[str, Tensor]) -> Tensor:
    op, _ = GRADIENTS[subject]
    first = [t for name, t in given.items() if name != "weight"]
    result: Tensor = op(*first, [given["x"].shape[-1]], given.get("weight"))
    return result


def program_of(subject: str, given: dict[str, Tensor]) -> Program:
    """One kernel that stores the gradient of x."""
    i, j = (Affine(0, ((name, 1),)) for name in ("i0", "i1"))
    index = {"gradient": (i, j), "x": (i, j), "weight": (j,)}
    loads = {n: Load(n, index.get(n, (i, Affine())), t.dtype) for n, t in given.items()}
    gradient, *others = (load for name, load in loads.items() if name != "weight")
    (rows, width), dtype = given["x"].shape, given["x"].dtype
    op, weight = GRADIENTS[subject][0], loads.get("weight")
    row = Row(op, gradient, ("i1",), (), (weight,), j, dtype, others=tuple(others))
    store = Store("result", (i, j), row, (rows, width), (width, 1), dtype)
    return Program((("i0", rows), ("i1", width)), (store,))


def computed(subject: str, given: dict[str, Tensor]) -> Tensor:
    """What a kernel makes of the operands, on a GPU."""
    result, x = torch.empty_like(given["x"]), given["x"]
    program = program_of(subject, given)
    Kernels().launched([program], given, x.device)[id(program)]({**given, "result": result})
    return result

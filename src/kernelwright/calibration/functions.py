"""Functions that generated kernels compute: a program of them, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..fuser import interpreter
from ..fuser.expression import Load, Step
from ..fuser.index import Affine
from ..fuser.launching import Kernels
from ..fuser.program import Program, Store

aten: Any = torch.ops.aten
# by subject: the step of a program, its keywords, and what eager calls
FUNCTIONS: dict[str, tuple[Any, dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "F.gelu": (aten.gelu.default, {}, lambda x: F.gelu(x)),
    "F.gelu tanh": (
        aten.gelu.default,
        {"approximate": "tanh"},
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "silu": (aten.silu.default, {}, lambda x: F.silu(x)),
    "sigmoid": (aten.sigmoid.default, {}, lambda x: torch.sigmoid(x)),
    "exp": (aten.exp.default, {}, lambda x: torch.exp(x)),
    "tanh": (aten.tanh.default, {}, lambda x: torch.tanh(x)),
    "sin": (aten.sin.default, {}, lambda x: torch.sin(x)),
    "cos": (aten.cos.default, {}, lambda x: torch.cos(x)),
    "rsqrt": (aten.rsqrt.default, {}, lambda x: torch.rsqrt(x)),
}
WIDTH = 128
# every so many of float32's bit patterns: subnormals, infinities and NaN among them
EVERY = 16411


def numbers(dtype: torch.dtype, device: str) -> Tensor:
    """[rows, WIDTH]: every number of a 16-bit dtype, and some of every magnitude in float32."""
    if dtype.itemsize == 2:
        patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    else:
        patterns = torch.arange(-(1 << 31), 1 << 31, EVERY).to(torch.int32)
    patterns = patterns[: patterns.numel() // WIDTH * WIDTH]
    return patterns.view(dtype).view(-1, WIDTH).to(device)


def program_of(subjects: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Program:
    """One kernel that stores each function of x."""
    index = Affine(0, (("i0", 1),)), Affine(0, (("i1", 1),))
    x = Load("x", index, dtype)
    stores = []
    for subject in subjects:
        op, keywords, _ = FUNCTIONS[subject]
        step = Step(op, (x,), tuple(keywords.items()), dtype)
        stores.append(Store(subject, index, step, tuple(shape), (shape[1], 1), dtype))
    return Program((("i0", shape[0]), ("i1", shape[1])), tuple(stores))


def computed(subjects: tuple[str, ...], x: Tensor) -> dict[str, Tensor]:
    """What a kernel makes of x, on a GPU; elsewhere what the interpreter of programs does."""
    program = program_of(subjects, x.shape, x.dtype)
    outputs = {subject: torch.empty_like(x) for subject in subjects}
    tensors: Mapping[str, Tensor] = {"x": x, **outputs}
    if x.device.type == "cuda":
        Kernels().launched([program], tensors, x.device)[id(program)](tensors)
    else:
        interpreter.run(program, tensors, outputs)
    return outputs


def expected(subject: str, x: Tensor) -> Tensor:
    return FUNCTIONS[subject][2](x)

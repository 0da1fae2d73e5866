"""Linear + GELU, with GELU in the epilogue of cuBLASLt's GEMM where that is faster."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.torch_internals import mark_constant
from .. import checks, selection
from ..composite import Composite
from ..gelu import GELU
from ..plan_cache import PlanCache, remember
from ..transforms import refuse_kernels, transformed
from . import algorithms, cases, compiled_chain, reference

__all__ = ["linear_gelu"]
BACKENDS = ("auto", "torch", "cublaslt")


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    approximate: bool = True,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = GELU(x @ weight^T + bias).

    Args:
        x: [..., K], float16, bfloat16 or float32; any strides.
        weight: [N, K], as in torch.nn.Linear, in the dtype of x.
        bias: [N] or None, in the dtype of x.
        approximate: the tanh form of GELU; False for the erf form.
        exact: "torch" is F.gelu(F.linear(x, weight, bias)) itself. The epilogue does not round
            between the two.
        backend: "torch" or "cublaslt" (the epilogue); None takes the one of `use_backend`, or the
            epilogue where it is faster, else F.linear and `gelu`. A named one runs or raises.

    >>> linear_gelu(torch.ones(1, 2), torch.tensor([[0.5, 0.5]]), torch.zeros(1))
    tensor([[0.8412]])
    """
    if backend is None:
        backend = selection.surrounding()
    if exact is not None:
        checks.choice("linear_gelu", "exact", exact, ("torch",))
        backend = "torch"
    # autocast casts the arguments of F.linear
    mixed = (
        isinstance(x, Tensor)
        and (x.is_cuda or x.is_cpu)
        and torch.is_autocast_enabled(x.device.type)
    )
    if not torch.compiler.is_compiling() and transformed((x, weight, bias)):
        _check(x, weight, bias, approximate, backend, mixed)
        refuse_kernels("linear_gelu", backend)
        return reference.linear_gelu(x, weight, bias, approximate)
    fused = _checked if torch.compiler.is_compiling() else _kept
    if fused(x, weight, bias, approximate, backend, mixed):
        return algorithms.linear(x, weight, bias, gelu=True)
    if torch.compiler.is_compiling() and not mixed:
        return compiled_chain.node(x, weight, bias, approximate)
    try:
        if backend == "torch" or mixed or _recording(x, weight, bias):
            return reference.linear_gelu(x, weight, bias, approximate)
        # the bits of the eager chain, which compiled graphs have as one node
        return GELU(F.linear(x, weight, bias), approximate, exact="torch", backend="auto")
    except (RuntimeError, TypeError):
        # a cached choice goes by shape and strides, which a tensor of another layout may share
        _check(x, weight, bias, approximate, backend, mixed)
        raise


def _kept(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: bool, backend: str, mixed: bool
) -> bool:
    """Whether the epilogue runs a call, cached by everything that decides it: checks run once."""
    grad = torch.is_grad_enabled()
    try:
        signature = (
            (x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad),
            (
                weight.shape,
                weight.stride(),
                weight.dtype,
                weight.device,
                grad and weight.requires_grad,
            ),
            bias is not None
            and (bias.shape, bias.stride(), bias.dtype, bias.device, grad and bias.requires_grad),
            (approximate, backend, mixed),
            _negative(x, weight, bias),
        )
        fused = _choices.get(signature)
    except (AttributeError, RuntimeError, TypeError):
        # not a tensor, no strides, or unhashable: the checks raise an error that names the argument
        _check(x, weight, bias, approximate, backend, mixed)
        raise
    if fused is None:
        fused = _checked(x, weight, bias, approximate, backend, mixed)
        remember(_choices, signature, fused)
    return fused


_choices: PlanCache[bool] = {}


def _checked(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: bool, backend: str, mixed: bool
) -> bool:
    """Check the arguments and choose."""
    _check(x, weight, bias, approximate, backend, mixed)
    if backend == "torch":
        return False
    no = _problem(x, weight, bias, approximate, mixed)
    if backend == "cublaslt" and no:
        raise ValueError(f"linear_gelu: backend 'cublaslt' cannot run this: {no}")
    return no is None and (backend == "cublaslt" or _faster(x.device.index))


def _problem(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: bool, mixed: bool
) -> str | None:
    """Why the epilogue cannot compute this, or None if it can."""
    if not x.is_cuda:
        # torch._addmm_activation on other devices is the erf form
        return f"tensors are on {x.device.type}, it needs a CUDA GPU"
    if not approximate:
        return "its GELU is the tanh form, and approximate is False"
    if bias is None:
        return "it needs a bias"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {x.dtype}"
    if mixed:
        return "autocast is on"
    if 0 in (*x.shape, *weight.shape):
        return "a tensor is empty"
    if _negative(x, weight, bias):
        return "a tensor is the negative of its memory"
    if _recording(x, weight, bias):
        return "it has no gradient: GELU's needs the product before it"
    return None


def _recording(*tensors: Tensor | None) -> bool:
    """Whether autograd records ops on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _negative(*tensors: Tensor | None) -> bool:
    """Whether one of them is a negative view (its is_neg() is True)."""
    if torch.compiler.is_compiling():  # is_neg cannot be traced, and nodes of a graph resolve it
        return False
    return any(t is not None and t.is_neg() for t in tensors)


@mark_constant
def _faster(device: int) -> bool:
    """5376 x 2048 x 8192 on an H200: 254 us, against 291 for Linear then GELU. On sm_120 cuBLASLt
    takes a slow kernel: 296 against 236 for 512 x 3072 x 12288 on an RTX 5090 (sglang 34350)."""
    return _capability(device)[0] < 12


_capability = functools.lru_cache(torch.cuda.get_device_capability)


def choose_for(device: torch.device, dtype: torch.dtype) -> selection.Choice:
    """The backend of a call without gradients, with bias and the tanh form."""
    half = dtype in (torch.float16, torch.bfloat16)
    if device.type == "cuda" and half and _faster(device.index or 0):
        return selection.Choice("cublaslt", "GELU in the epilogue of the matrix product")
    return selection.Choice("torch", "linear, then GELU")


def _check(x: Any, weight: Any, bias: Any, approximate: Any, backend: Any, mixed: bool) -> None:
    name = "linear_gelu"
    checks.choice(name, "backend", backend, BACKENDS)
    checks.tensor(name, "x", x)
    checks.tensor(name, "weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"{name}: weight has shape {list(weight.shape)}, expected [N, K]")
    if weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{name}: weight takes width {weight.shape[1]}, x has {x.shape[-1]}")
    checks.vector(name, "bias", bias, weight.shape[0], "weight")
    given = {"x": x, "weight": weight} if bias is None else {"x": x, "weight": weight, "bias": bias}
    checks.common(name, given)
    for argument, t in given.items():
        if t.dtype != x.dtype and not mixed:
            raise TypeError(f"{name}: {argument} is {t.dtype}, x is {x.dtype}")
    if not isinstance(approximate, bool):
        came = checks.shown(approximate)
        raise TypeError(f"{name}: approximate is {came}, expected True or False")


Composite(
    name="linear_gelu",
    formula="GELU(x · weightᵀ + bias)",
    function=linear_gelu,
    reference=reference.linear_gelu,
    exact={"torch": reference.linear_gelu},
    cases=cases.LINEAR_GELU,
    backends=("torch", "cublaslt"),
    chooser=choose_for,
)

"""F.linear, bit for bit, by the algorithm of cuBLASLt that was fastest when it was first asked; and
the same with GELU in its epilogue.

PyTorch takes the algorithm that cuBLASLt names first. Where a GPU is at the limit of its power that
is not always the fastest: gate and up of Llama-3-8B as one product (4096 x 4096 to 28672, bfloat16)
took 1482 us on an H200, and 1366 by another of the 8 that it names, with the same bits; see
`configurations` for those that it does not.

KERNELWRIGHT_CUBLASLT=0 in the environment leaves every product to PyTorch.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import selection
from ..signature import PLAIN
from . import choosing
from .choosing import MISALIGNED, Decision, aligned, choose
from .plain import plain

# about 40 us on an H200 at 600 TFLOP/s. of a shorter product 2% is less than a microsecond, and its
# launch weighs as much as the choice of its algorithm
LEAST_FLOP = 2**34.5
# to choose takes some 30 products: with ever new sequence lengths it would never pay
MAX_DECISIONS = 256

# absent from a build for the CPU
_tunes = getattr(torch._C, "_cuda_tunableop_is_enabled", bool)

_decisions: dict[Any, Decision] = {}
_choosing = threading.Lock()
_on = ContextVar("kernelwright_cublaslt", default=os.environ.get("KERNELWRIGHT_CUBLASLT") != "0")


class _Thread(threading.local):
    """cuBLASLt runs in a thread that has a CUDA context; F.linear gives it one."""

    ready = False


_thread = _Thread()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """y = x @ weight^T + bias: F.linear(x, weight, bias), bit for bit, by the algorithm that was
    fastest when it was first asked.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        gelu: its tanh form in the epilogue, as torch._addmm_activation has it; with a bias.

    The first large product of a signature on a GPU of capability 9.0, in float16 or bfloat16, tries
    all algorithms on its data and takes some 10 to 60 ms. Everything else is F.linear itself:
    small products, other GPUs, gradients, autocast, torch.compile, a graph that is being captured.

    >>> linear(torch.ones(1, 2), torch.tensor([[0.5, 0.25]]))
    tensor([[0.7500]])
    """
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state()
    if traced or not _may_choose(x, weight, bias):
        return plain(x, weight, bias, gelu)
    try:
        key = (
            (x.shape, x.stride(), x.dtype, x.device),
            (weight.shape, weight.stride(), weight.dtype, weight.device),
            bias is not None and (bias.shape, bias.stride(), bias.dtype, bias.device),
            gelu,
            settings(),
        )
    except RuntimeError:  # a nested tensor
        return plain(x, weight, bias, gelu)
    decision = _decisions.get(key)
    if decision is None:
        return _first(key, x, weight, bias, gelu)
    way = decision.way
    if way is None or not _thread.ready:
        _thread.ready = True
        return plain(x, weight, bias, gelu)
    out = way.room()
    status = way.into(out, x, weight, bias)
    if status == 0:
        return out
    if status != MISALIGNED:
        why = f"cublasLtMatmul answered with status {status}"
        _decisions[key] = replace(decision, way=None, why=why)
    return plain(x, weight, bias, gelu)


def settings() -> tuple[Any, ...]:
    """What a person may set that decides how products in 16 bits are summed."""
    state: Any = torch._C
    return (
        state._get_cublas_allow_fp16_accumulation(),
        state._get_cublas_allow_fp16_reduced_precision_reduction(),
        state._get_cublas_allow_bf16_reduced_precision_reduction(),
        state._get_blas_preferred_backend().value,  # the enumeration itself is slow to hash
        state._get_deterministic_algorithms(),
        state._get_sm_carveout_experimental(),
        _tunes(),
    )


@contextmanager
def use_algorithms(on: bool) -> Iterator[None]:
    """Whether `linear` may take another algorithm than PyTorch's in the block."""
    token = _on.set(on)
    try:
        yield
    finally:
        _on.reset(token)


def decisions() -> list[Decision]:
    """What was decided so far, a product each."""
    return list(_decisions.values())


def describe() -> str:
    """One line: how many products run by another algorithm, how much faster, and why not all."""
    made = decisions()
    if not made:
        return "no product was large enough to choose an algorithm for"
    gains = sorted(d.torch_us / d.us for d in made if d.way and d.torch_us and d.us)
    text = f"{len(gains)} of {len(made)} products by another algorithm than PyTorch's"
    if gains:
        text += f", {gains[0]:.2f} to {gains[-1]:.2f} times as fast"
    kept = Counter(d.why for d in made if d.way is None)
    why_not = [f"{n} not: {why}" for why, n in kept.most_common()]
    devices = dict.fromkeys(key[0][-1] for key in list(_decisions))
    return "; ".join([text, *why_not, *dict.fromkeys(map(unnamed, devices))])


def unnamed(device: torch.device) -> str:
    """One line: whether configurations that cuBLASLt does not name by itself are tried on this GPU,
    and why not."""
    if not _on.get():
        why: str | None = "KERNELWRIGHT_CUBLASLT=0 leaves products to PyTorch"
    elif not serves(device):
        why = "algorithms are chosen on GPUs of capability 9.0"
    else:
        why = choosing.unnamed_problem(-1 if device.index is None else device.index)
    state = "tried" if why is None else f"not tried: {why}"
    return f"configurations that cuBLASLt does not name are {state}"


def forget() -> None:
    """Choose anew from here on."""
    _decisions.clear()
    choosing.forget()


def _may_choose(x: Any, weight: Any, bias: Any) -> bool:
    """Whether this call may go another way than through PyTorch, whatever its layout."""
    return (
        type(x) in PLAIN
        and type(weight) in PLAIN
        and (bias is None or type(bias) in PLAIN)
        and x.layout is weight.layout is torch.strided
        and weight.ndim == 2
        and 2 * x.numel() * weight.shape[0] >= LEAST_FLOP
        and _on.get()
        and serves(x.device)
        and not (torch.is_grad_enabled() and _needs_grad(x, weight, bias))
        and not _watched()
        and selection.current.get() != "torch"
    )


def _needs_grad(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)


def _watched() -> bool:
    """Whether somebody would miss F.linear."""
    state = torch._C
    return bool(
        state._len_torch_dispatch_stack()
        or state._len_torch_function_stack()
        or state._is_any_autocast_enabled()
        or state._functorch.peek_interpreter_stack()
        or forward_ad._current_level >= 0
    )


@functools.cache
def serves(device: torch.device) -> bool:
    """GPUs on which it was measured."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) == (9, 0)


def _first(key: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    """PyTorch's way, and then all others beside it, unless this is not the time for that."""
    expected = plain(x, weight, bias, gelu)
    _thread.ready = True
    full = len(_decisions) >= MAX_DECISIONS
    if full or not aligned(x, weight, bias) or torch.cuda.is_current_stream_capturing():
        return expected
    # another thread that asks meanwhile has its result already
    if _choosing.acquire(blocking=False):
        try:
            if key not in _decisions:
                _decisions[key] = choose(x, weight, bias, gelu, expected)
        finally:
            _choosing.release()
    return expected

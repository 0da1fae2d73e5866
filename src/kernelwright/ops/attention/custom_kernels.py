"""Attention kernels from outside PyTorch, as one torch.library op: Triton, flash-attn-4, the Hub.

Eager calls that need no gradient call the kernel directly. torch.compile and autograd see
torch.ops.kernelwright.attention_forward, whose backward recomputes the forward through PyTorch's
attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import backends
from .. import gradient, hub_servers, library
from ..plan import Call
from ..plan_cache import PLAIN, PlanCache, remember
from ..rows import has_gaps, with_dense_rows
from . import sdpa

ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, float? scale, bool causal"


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
    backend: str,
) -> Tensor:
    """Attention on the named kernel: "triton", "fa4" or "hub"."""
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    plain = all(type(t) in PLAIN for t in tensors)
    if needs_grad or not plain or torch.compiler.is_compiling():
        return _node(query, key, value, mask, scale, causal, backend)
    return _run_kernel(query, key, value, mask, scale, causal, backend)


def allocate(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """An output with the memory order of query, so that models merge the heads without a copy."""
    batch, heads, rows, width = *query.shape[:3], value.shape[3]
    if _heads_of_a_token_are_together(query):
        return query.new_empty(batch, rows, heads, width).transpose(1, 2)
    return query.new_empty(batch, heads, rows, width)


def _heads_of_a_token_are_together(query: Tensor) -> bool:
    return not has_gaps(query) and query.stride(1) < query.stride(2)


def _run_kernel(*values: Any) -> Tensor:
    *args, backend = values
    # kernels read memory and would miss the sign of a negative view
    args = [a.resolve_neg() if isinstance(a, Tensor) else a for a in args]
    if backend == "hub":
        server = hub_servers.server("attention")
        if server is None:
            raise ValueError("attention: the kernel from the Hub that served it was let go")
        return server.run(*args)
    return (_run_triton if backend == "triton" else _run_fa4)(*args)


def _run_triton(*args: Any) -> Tensor:
    # the kernel reads along the last dimension; tensors of other strides are copied first
    args = with_dense_rows(args)
    tensors = [a for a in args[:4] if a is not None]
    pointers = [t.data_ptr() for t in tensors]
    bits = functools.reduce(int.__or__, pointers, 16)
    alignment = bits & -bits
    signature = (
        alignment,
        *((a.shape, a.stride(), a.dtype, a.device) if isinstance(a, Tensor) else a for a in args),
    )
    out = allocate(*args)
    device = out.get_device()
    launch = _launches.get(signature)
    if launch is None:
        launch = remember(_launches, signature, _load(args, out, alignment))
    if device < 0:  # Triton's interpreter takes the tensors themselves
        launch([*tensors, out])
    elif torch.cuda.current_device() == device:
        launch([*pointers, out.data_ptr()])
    else:
        with torch.cuda.device(device):
            launch([*pointers, out.data_ptr()])
    return out


_launches: PlanCache[Callable[[list[Any]], None]] = {}


def _load(args: tuple[Any, ...], out: Tensor, alignment: int) -> Callable[[list[Any]], None]:
    from .launch import plan

    values = dict(zip(("query", "key", "value", "mask", "scale", "causal"), args, strict=True))
    values["out"] = out
    call = Call(
        values,
        op="attention",
        exact=None,
        target=backends.Target.of(out.device),
        alignment=alignment,
    )
    return backends.load(plan(call), values, out.device, "attention")


def _run_fa4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    result = _fa4()(q, k, v, softmax_scale=scale, causal=causal)
    # (out, logsumexp), or out alone in the first betas; [B, Sq, H, Dv] in memory
    out = (result[0] if isinstance(result, tuple) else result).transpose(1, 2)
    return out if _heads_of_a_token_are_together(query) else out.contiguous()


@functools.lru_cache
def _fa4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func

    return flash_attn_func


def _fake(*values: Any) -> Tensor:
    return allocate(*values)


def _in_steps(*values: Any) -> Tensor:
    *args, _ = values
    return sdpa.math(*args)


_node = library.define(
    "attention_forward", f"({ARGUMENTS}, str backend) -> Tensor", _run_kernel, _fake
)


def register_gradient(attention: Callable[..., Tensor]) -> None:
    """Recompute the forward by `attention`, which takes PyTorch's kernels, for the gradient."""
    arguments = ARGUMENTS.split(", ")
    gradient.recompute(_node, "attention_forward", arguments, attention, _in_steps, twice=sdpa.math)

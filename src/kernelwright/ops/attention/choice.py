"""Which attention kernel runs a call. No kernel wins everywhere, so measurements decide.

Forward, bf16, one H200, torch 2.11, microseconds:

    [batch, heads, tokens, head_dim]    cuDNN    flash (FA2)    flash-attn-4
    2 x 32 x 1320 x 64  (LTX 25f)         117            148             198
    2 x 32 x 2688 x 64  (LTX 49f)         295            451             343
    2 x 24 x 4429 x 64  (SD3.5)           615            872             541
    2 x 32 x 8064 x 64  (LTX 161f)       2164           3520            2042
    2 x 32 x 2688 x 64, 128 keys           43             54             111
    1 x 24 x 4608 x 128 (FLUX)            424            809             467
    1 x 12 x 32760 x 128 (Wan)          11608          18447           10325
    1 x 32/8 x 4096 x 128 causal          279            524             303

Attention to few keys: cuDNN, our Triton kernel, and a copy of query and result, in a later run:

    [batch, heads, queries, head_dim], keys     cuDNN    masked    ours    masked    copy
    2 x 32 x 1320 x 64, 128  (LTX 25f)           17.7      24.9    13.3      13.9     7.2
    2 x 32 x 2688 x 64, 128  (LTX 49f)           27.2      40.5    19.7      20.5    12.5
    2 x 32 x 8064 x 64, 128  (LTX 161f)          68.3     105.2    48.3      49.5    33.0
    2 x 10 x 4096 x 64, 77   (SDXL)              17.3         -    13.1         -     7.2
    2 x 20 x 1024 x 64, 77   (SDXL)              12.5         -     8.8         -     4.6
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..selection import Choice
from . import limits, tiles
from .launch import mask_strides
from .limits import Request

BACKENDS = ("auto", "torch", "triton", "cudnn", "flash", "efficient", "math", "fa4", "hub")

# tokens (queries and keys both) from which flash-attn-4 beats cuDNN on an H200
# head_dim 64: 16% more time at 2,688 tokens, 12% less at 4,429
FA4_TOKENS_64 = 4429
# head_dim 128: 10% more at 4,608, 11% less at 32,760; this is their geometric mean
FA4_TOKENS_128 = 12288
# queries from which our kernel for few keys beats cuDNN on an H200; fewer were not tried
FEW_KEYS_QUERIES = 1024


def request_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> Request:
    """The facts of a call whose arguments have been checked."""
    grad = torch.is_grad_enabled()
    return Request(
        device=query.device,
        capability=limits.capability(query.device.index) if query.is_cuda else (0, 0),
        dtype=query.dtype,
        queries=query.shape[2],
        keys=key.shape[2],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        mask=_mask_kind(mask, query.dtype),
        mask_rows=mask_strides(mask)[2] != 0,
        causal=causal,
        grad=grad and (query.requires_grad or key.requires_grad or value.requires_grad),
        mask_grad=grad and mask is not None and mask.requires_grad,
        aligned=_aligned(query) and _aligned(key) and _aligned(value),
        deterministic=limits.deterministic(),
        disabled=limits.disabled() if query.is_cuda else (),
    )


def choose(request: Request, backend: str = "auto") -> Choice:
    """The backend for a call and why. A named one is used or raises a ValueError."""
    if backend != "auto":
        reason = limits.problem(backend, request)
        if reason:
            raise ValueError(f"attention: backend {backend!r} cannot run this: {reason}")
        return Choice(backend, "asked for by name")
    if not (request.grad or request.mask_grad) and limits.problem("hub", request) is None:
        return Choice("hub", "a kernel from the Hub serves attention")
    if request.device.type != "cuda":
        return Choice("torch", f"tensors on {request.device.type}: PyTorch's own")
    refused: list[str] = []
    for name, reason in _order(request):
        why_not = limits.problem(name, request)
        if name in request.disabled:
            why_not = "it is turned off in torch.backends.cuda"
        if why_not is None:
            return Choice(name, "; ".join([reason, *refused]))
        refused.append(f"not {name}: {why_not}")
    return Choice("math", "; ".join(["the only kernel left", *refused]))


def choose_for(device: torch.device, dtype: torch.dtype) -> Choice:
    """The kernel for a long sequence without a mask, as `kernelwright doctor` prints it."""
    shape = {"queries": 4096, "keys": 4096, "head_dim": 128, "value_dim": 128}
    return choose(
        Request(
            device=device,
            capability=limits.capability(device.index) if device.type == "cuda" else (0, 0),
            dtype=dtype,
            **shape,
            mask="none",
            mask_rows=False,
            causal=False,
            grad=False,
            mask_grad=False,
            aligned=True,
            deterministic=False,
            disabled=(),
        )
    )


def _order(r: Request) -> list[tuple[str, str]]:
    """Kernels, fastest first; for sm_90 by the table above."""
    order: list[tuple[str, str]] = []
    major = r.capability[0]
    masked = r.mask != "none"
    if major == 9 and not r.grad:
        from_tokens = FA4_TOKENS_64 if r.head_dim <= 64 else FA4_TOKENS_128
        if min(r.queries, r.keys) >= from_tokens and limits.fa4_installed():
            order.append(("fa4", f"fastest on an H200 from {from_tokens} tokens"))
    if r.aligned and not (r.grad or r.mask_grad) and r.queries >= FEW_KEYS_QUERIES:
        shape = r.queries, r.keys, max(r.head_dim, r.value_dim)
        if tiles.few_keys(r.capability, r.dtype, *shape, r.causal, r.mask_rows):
            order.append(("triton", "holds all keys of a head: fastest on an H200 for so few"))
    # cuDNN's backward gives NaN for some masked lengths (pytorch issue 196678, torch 2.11 on H200)
    if major in (9, 10) and not (masked and r.grad):
        measured = "fastest on an H200 at these sizes" if major == 9 else ""
        order.append(("cudnn", measured or "PyTorch's first choice on this GPU, not measured here"))
    # PyTorch's own order where cuDNN is not first; not measured here
    order.append(("flash", "PyTorch's first choice without a mask"))
    order.append(("efficient", "PyTorch's first choice with a mask or float32"))
    if not (r.grad or r.mask_grad):
        order.append(("triton", "takes any head_dim, mask and alignment without a score matrix"))
    return order


def _mask_kind(mask: Tensor | None, dtype: torch.dtype) -> str:
    if mask is None:
        return "none"
    if mask.dtype == torch.bool:
        return "bool"
    return "float" if mask.dtype == dtype else "other"


def _aligned(t: Tensor) -> bool:
    """Whether rows are dense and start on multiples of 16 bytes, as 16-byte loads need. torch's
    allocations start on multiples of 512."""
    size = t.element_size()
    if t.stride(3) != 1 and t.shape[3] != 1:
        return False
    # torch.compile cannot read an offset; Inductor assumes aligned inputs too
    offset = 0 if torch.compiler.is_compiling() else t.storage_offset()
    return offset * size % 16 == 0 and all(
        t.shape[i] == 1 or t.stride(i) * size % 16 == 0 for i in range(3)
    )

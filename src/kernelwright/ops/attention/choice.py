"""Which attention kernel runs a call. No kernel wins everywhere, so this is a table of readings.

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
"""

from __future__ import annotations

import functools
from importlib import metadata
from typing import NamedTuple

import torch
from torch import Tensor

from ... import backends
from ..op import Choice
from .launch import MAX_HEAD_DIM

BACKENDS = ("auto", "torch", "triton", "cudnn", "flash", "efficient", "math", "fa4")
HALF = (torch.float16, torch.bfloat16)

# tokens (queries and keys both) from which flash-attn-4 beats cuDNN on an H200
# head_dim 64: 16% more time at 2,688 tokens, 12% less at 4,429
FA4_TOKENS_64 = 4429
# head_dim 128: 10% more at 4,608, 11% less at 32,760; this is the geometric middle of the two
FA4_TOKENS_128 = 12288


class Request(NamedTuple):
    """What the choice depends on, and nothing else."""

    device: torch.device
    capability: tuple[int, int]
    dtype: torch.dtype
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    mask: str
    causal: bool
    grad: bool
    mask_grad: bool
    aligned: bool
    deterministic: bool
    disabled: tuple[str, ...]


def request_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> Request:
    """Describe a call whose arguments have been checked."""
    grad = torch.is_grad_enabled()
    return Request(
        device=query.device,
        capability=capability(query.device.index) if query.is_cuda else (0, 0),
        dtype=query.dtype,
        queries=query.shape[2],
        keys=key.shape[2],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        mask=_mask_kind(mask, query.dtype),
        causal=causal,
        grad=grad and (query.requires_grad or key.requires_grad or value.requires_grad),
        mask_grad=grad and mask is not None and mask.requires_grad,
        aligned=_aligned(query) and _aligned(key) and _aligned(value),
        deterministic=deterministic(),
        disabled=disabled() if query.is_cuda else (),
    )


def choose(request: Request, backend: str = "auto") -> Choice:
    """The backend for a call and why; a named one or a ValueError, never another."""
    if backend != "auto":
        reason = problem(backend, request)
        if reason:
            raise ValueError(f"attention: backend {backend!r} cannot run this: {reason}")
        return Choice(backend, "asked for by name")
    if request.device.type != "cuda":
        return Choice("torch", f"tensors on {request.device.type}: PyTorch's own")
    refused: list[str] = []
    for name, reason in _order(request):
        why_not = problem(name, request)
        if name in request.disabled:
            why_not = "it is turned off in torch.backends.cuda"
        if why_not is None:
            return Choice(name, "; ".join([reason, *refused]))
        refused.append(f"not {name}: {why_not}")
    return Choice("math", "; ".join(["the only kernel left", *refused]))


def choose_for(device: torch.device, dtype: torch.dtype) -> Choice:
    """The kernel for a long sequence without a mask, the common case, as `doctor` prints it."""
    shape = {"queries": 4096, "keys": 4096, "head_dim": 128, "value_dim": 128}
    return choose(
        Request(
            device=device,
            capability=capability(device.index) if device.type == "cuda" else (0, 0),
            dtype=dtype,
            **shape,
            mask="none",
            causal=False,
            grad=False,
            mask_grad=False,
            aligned=True,
            deterministic=False,
            disabled=(),
        )
    )


def _order(r: Request) -> list[tuple[str, str]]:
    """Kernels from the fastest down; the table above is the reason for sm_90."""
    order: list[tuple[str, str]] = []
    major = r.capability[0]
    masked = r.mask != "none"
    if major == 9 and not r.grad:
        from_tokens = FA4_TOKENS_64 if r.head_dim <= 64 else FA4_TOKENS_128
        if min(r.queries, r.keys) >= from_tokens and fa4_installed():
            order.append(("fa4", f"fastest on an H200 from {from_tokens} tokens"))
    # cuDNN's backward gives NaN for some masked lengths (pytorch issue 196678, torch 2.11 on H200)
    if major in (9, 10) and not (masked and r.grad):
        measured = "fastest on an H200 at these sizes" if major == 9 else ""
        order.append(("cudnn", measured or "PyTorch's first choice on this GPU, not measured here"))
    # the order PyTorch itself takes where cuDNN is not first; not measured here
    order.append(("flash", "PyTorch's first choice without a mask"))
    order.append(("efficient", "PyTorch's first choice with a mask or float32"))
    if not (r.grad or r.mask_grad):
        order.append(("triton", "takes any head_dim, mask and alignment without a score matrix"))
    return order


def problem(name: str, r: Request) -> str | None:
    """Why a backend cannot run a call, or None if it can."""
    if name in ("torch", "math"):
        return None
    if name == "triton":
        return _triton_problem(r)
    if r.device.type != "cuda":
        return f"tensors are on {r.device.type}, it needs a CUDA GPU"
    if name == "efficient":
        return _efficient_problem(r)
    if r.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {r.dtype}"
    if r.capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {_dotted(r.capability)}"
    if not r.aligned and not (name == "flash" and r.head_dim % 8):
        return "it needs rows that start on multiples of 16 bytes"
    return {"cudnn": _cudnn_problem, "flash": _flash_problem, "fa4": _fa4_problem}[name](r)


def _triton_problem(r: Request) -> str | None:
    if r.dtype == torch.float64:
        return "float64 runs in plain PyTorch"
    if max(r.head_dim, r.value_dim) > MAX_HEAD_DIM:
        return f"it holds head_dim up to {MAX_HEAD_DIM}, not {max(r.head_dim, r.value_dim)}"
    return triton_problem(r.device, r.dtype)


def _efficient_problem(r: Request) -> str | None:
    if r.dtype not in (*HALF, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {r.dtype}"
    if r.dtype == torch.bfloat16 and r.capability < (8, 0):
        return "it has no bfloat16 below compute capability 8.0"
    multiple = 4 if r.dtype == torch.float32 else 8
    if r.head_dim % multiple or r.value_dim % multiple:
        return f"it needs head_dim to be a multiple of {multiple}"
    if not r.aligned:
        return "it needs rows that start on multiples of 16 bytes"
    if r.mask == "other":
        return "it needs a mask of bool or of the dtype of query"
    return None


def _cudnn_problem(r: Request) -> str | None:
    if r.head_dim % 8 or r.value_dim % 8 or max(r.head_dim, r.value_dim) > 128:
        return "it needs head_dim to be a multiple of 8 up to 128"
    if r.keys < 2:
        return "it needs more than one key"
    if r.mask == "other":
        return "it needs a mask of bool or of the dtype of query"
    if r.mask_grad:
        return "it gives no gradient for the mask"
    if r.deterministic:
        return "it is not deterministic, and torch.use_deterministic_algorithms is on"
    return None


def _flash_problem(r: Request) -> str | None:
    if r.mask != "none":
        return "it takes no mask"
    if r.head_dim != r.value_dim or r.head_dim > 256:
        return "it needs one head_dim up to 256 for query and value"
    if r.causal and r.queries != r.keys:
        return "it aligns the causal mask to the last key, PyTorch to the first"
    if r.grad and r.head_dim > 192 and r.capability not in ((8, 0), (9, 0), (10, 0), (10, 3)):
        return "its backward needs head_dim up to 192 on this GPU"
    return None


def _fa4_problem(r: Request) -> str | None:
    if not fa4_installed():
        return "flash-attn-4 is not installed (pip install 'kernelwright[attention]')"
    if r.mask != "none":
        return "it takes no mask"
    most = 256 if r.capability[0] == 9 else 128
    if r.head_dim % 8 or r.value_dim % 8 or max(r.head_dim, r.value_dim) > most:
        return f"it needs head_dim to be a multiple of 8 up to {most} on this GPU"
    if r.causal and r.queries != r.keys:
        return "it aligns the causal mask to the last key, PyTorch to the first"
    return None


# torch.compile looks through lru_cache, so what it must take as given stands around it


@torch.compiler.assume_constant_result
def capability(index: int | None) -> tuple[int, int]:
    return _capability(index)


@torch.compiler.assume_constant_result
def triton_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    return _triton_problem_here(device, dtype)


@torch.compiler.assume_constant_result
def fa4_installed() -> bool:
    return _fa4_installed()


_capability = functools.lru_cache(torch.cuda.get_device_capability)
_triton_problem_here = functools.lru_cache(functools.partial(backends.problem, "triton"))


@functools.lru_cache
def _fa4_installed() -> bool:
    # asked of the metadata: importing flash_attn.cute loads the whole CuTe DSL
    try:
        metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return False
    return True


def switches() -> tuple[bool, bool, bool]:
    """PyTorch's own switches for cuDNN, flash and efficient; `auto` leaves alone what is off."""
    flags = torch._C
    return (
        flags._get_cudnn_sdp_enabled(),
        flags._get_flash_sdp_enabled(),
        flags._get_mem_efficient_sdp_enabled(),
    )


@torch.compiler.assume_constant_result
def deterministic() -> bool:
    """Whether kernels that add up in any order are forbidden, not only warned of."""
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()


@torch.compiler.assume_constant_result
def disabled() -> tuple[str, ...]:
    names = ("cudnn", "flash", "efficient")
    return tuple(name for name, on in zip(names, switches(), strict=True) if not on)


def _mask_kind(mask: Tensor | None, dtype: torch.dtype) -> str:
    if mask is None:
        return "none"
    if mask.dtype == torch.bool:
        return "bool"
    return "float" if mask.dtype == dtype else "other"


def _aligned(t: Tensor) -> bool:
    """Rows are dense and start on multiples of 16 bytes, as 16-byte loads need; torch's own
    allocations start on multiples of 512."""
    size = t.element_size()
    if t.stride(3) != 1 and t.shape[3] != 1:
        return False
    # torch.compile cannot read an offset; Inductor itself takes inputs for aligned
    offset = 0 if torch.compiler.is_compiling() else t.storage_offset()
    return offset * size % 16 == 0 and all(
        t.shape[i] == 1 or t.stride(i) * size % 16 == 0 for i in range(3)
    )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"

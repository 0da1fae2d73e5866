"""What each attention kernel can run: the facts of a call, and why a kernel refuses it.

PyTorch checks its limits in `F.scaled_dot_product_attention`, not in the kernels that are called
here by name, so they are repeated here; where versions of PyTorch differ, the narrower limit.
"""

from __future__ import annotations

import functools
import importlib
from importlib import metadata
from typing import NamedTuple

import torch

from ... import backends
from ...backends.torch_internals import attention_kernels, mark_constant
from ...backends.user_warnings import warn
from .. import hub_servers
from .launch import MAX_HEAD_DIM

HALF = (torch.float16, torch.bfloat16)
CUDNN_WITH_256 = 91000  # 9.10.0


class Request(NamedTuple):
    """Everything that the choice depends on."""

    device: torch.device
    capability: tuple[int, int]
    dtype: torch.dtype
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    mask: str
    mask_rows: bool  # the mask differs between queries
    causal: bool
    grad: bool
    mask_grad: bool
    aligned: bool
    deterministic: bool
    disabled: tuple[str, ...]


def problem(name: str, r: Request) -> str | None:
    """Why a backend cannot run a call, or None if it can."""
    if name in ("torch", "math"):
        return None
    if name == "triton":
        return _triton_problem(r)
    if name == "hub":
        return hub_problem(r)
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
    # on Hopper cuDNN runs heads of up to 256 from 9.10 on; its backward was not tested with them
    wide = r.capability == (9, 0) and not r.grad and cudnn_version() >= CUDNN_WITH_256
    most = 256 if wide else 128
    if r.head_dim % 8 or r.value_dim % 8 or max(r.head_dim, r.value_dim) > most:
        return f"it needs head_dim to be a multiple of 8 up to {most}"
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


# torch.compile traces through lru_cache, so the functions marked as constants wrap the cached ones


@mark_constant
def capability(index: int | None) -> tuple[int, int]:
    return _capability(index)


@mark_constant
def cudnn_version() -> int:
    return torch.backends.cudnn.version() or 0


@mark_constant
def triton_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    return _triton_problem_here(device, dtype)


@mark_constant
def fa4_installed() -> bool:
    return not left_out and _fa4_installed()


left_out: list[str] = []  # filled by `without_fa4`


def hub_problem(r: Request) -> str | None:
    # under torch.compile a call with symbolic sizes is no constant: only pass it on if necessary
    if not _hub_serves():
        return "no kernel from the Hub serves attention (kernelwright.hub.use)"
    return _hub_server_problem(r)


@mark_constant
def _hub_serves() -> bool:
    return hub_servers.server("attention") is not None


@mark_constant
def _hub_server_problem(r: Request) -> str | None:
    server = hub_servers.server("attention")
    assert server is not None
    return server.problem(r)


_capability = functools.lru_cache(torch.cuda.get_device_capability)
_triton_problem_here = functools.lru_cache(functools.partial(backends.problem, "triton"))


@functools.lru_cache
def _fa4_installed() -> bool:
    # the metadata first: importing flash_attn.cute loads the whole CuTe DSL
    try:
        metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return False
    try:
        importlib.import_module("flash_attn.cute")
    except Exception as error:
        # a dependency may be missing, or be built for another GPU or Python
        warn(f"flash-attn-4 is installed but does not load: {error}")
        return False
    return True


@mark_constant
def deterministic() -> bool:
    """Whether torch.use_deterministic_algorithms raises, rather than warns."""
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()


@mark_constant
def disabled() -> tuple[str, ...]:
    """The kernels that PyTorch's switches turn off; "auto" never takes one of them."""
    names = ("cudnn", "flash", "efficient")
    return tuple(name for name, on in zip(names, attention_kernels(), strict=True) if not on)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"

"""How a model is prepared for training: adapters, checkpointing, attention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import CannotRun

# the projections of attention, under the names of diffusers and transformers
LORA_TARGETS = (
    "to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "o_proj",
    "qkv_proj", "query_key_value", "self_attention.dense", "to_query", "to_key", "to_value",
)  # fmt: skip
ATTENTION = {
    "default": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def add_lora(model: nn.Module, rank: int) -> None:
    """Put adapters of this rank around the projections of attention; only they are trained. Both
    factors are random: with the usual zeros half of the gradients would be zero."""
    if find_spec("peft") is None:
        raise CannotRun("peft is not installed: pip install peft")
    from peft import LoraConfig, inject_adapter_in_model

    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    targets = sorted({t for t in LORA_TARGETS for n in linears if f".{n}".endswith(f".{t}")})
    if not targets:
        raise CannotRun(f"{type(model).__name__} has no layer named {', '.join(LORA_TARGETS)}")
    with torch.random.fork_rng(devices=_devices(model)):
        torch.manual_seed(11)
        model.requires_grad_(False)
        inject_adapter_in_model(
            LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights=False),
            model,
        )


def _devices(model: nn.Module) -> list[torch.device]:
    return [d for d in {p.device for p in model.parameters()} if d.type == "cuda"]


def checkpoint(model: Any) -> None:
    """Recompute blocks in the backward instead of keeping their values."""
    if hasattr(model, "gradient_checkpointing_enable"):  # transformers
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "enable_gradient_checkpointing"):  # diffusers
        model.enable_gradient_checkpointing()
    else:
        raise CannotRun(f"{type(model).__name__} has no gradient checkpointing")


def attention(name: str) -> AbstractContextManager[Any]:
    """PyTorch's attention by one backend; "default" leaves the choice to PyTorch."""
    backend = ATTENTION[name]
    return nullcontext() if backend is None else sdpa_kernel(backend)


def repeatable(name: str) -> AbstractContextManager[Any]:
    """Attention whose gradients repeat themselves: the backend of this name, or for "default" flash
    and, where it takes no mask, the steps of math. Masked, PyTorch would choose the efficient
    kernel, whose gradients differ from run to run on a GPU, deterministic algorithms or not.

    The order of kernels is left alone: in each of PyTorch's own, flash comes before math. PyTorch
    finds its order for a GPU at the first attention there. A context that sets one before then
    leaves that of older GPUs behind, and what is timed later does not take cuDNN first."""
    if name != "default":
        return attention(name)
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def promise_deterministic_products(device: torch.device) -> None:
    """Set what PyTorch's deterministic algorithms ask for where products run: it looks for this
    variable at the first product of a process. As long as it is set, torch 2.11 parses it at every
    product, which takes the host some 80 us, so it is removed again. That is safe for this value
    alone: the workspace that a smaller one leaves behind is taken to be as large as the default."""
    if device.type != "cuda" or WORKSPACE in os.environ:
        return
    os.environ[WORKSPACE] = ":4096:8"
    try:
        torch.mm(*(torch.zeros(16, 16, dtype=torch.bfloat16, device=device) for _ in range(2)))
    finally:
        del os.environ[WORKSPACE]


@contextmanager
def deterministic() -> Iterator[None]:
    """PyTorch's deterministic algorithms, without its filling of new memory."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    memory.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
        memory.fill_uninitialized_memory = filled

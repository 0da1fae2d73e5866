"""What a graph depends on beside its model: the inputs of a call, and the state of the process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as global_hooks
from torch.utils import _pytree as pytree

from ...ops.selection import surrounding
from .memory import PLAIN_TYPES, TENSOR_TYPES, Refusal, alignment, is_no_container, is_simple


class Call:
    """The inputs of a call, taken apart. Calls with one key can share a graph."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], device_type: str) -> None:
        self._leaves, self._structure = pytree.tree_flatten((args, kwargs), is_leaf=is_no_container)
        self.tensors = [x for x in self._leaves if isinstance(x, Tensor)]
        devices = {t.device for t in self.tensors}
        if not devices:
            raise Refusal("no tensor among the inputs")
        # the value of a tensor on the CPU would become part of the graph
        if len(devices) > 1 or self.tensors[0].device.type != device_type:
            raise Refusal(f"inputs on {listed(devices)}")
        (self.device,) = devices
        marks = tuple(map(_mark, self._leaves))
        self.key = (self.device, self._structure, marks, _switches(device_type))

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """The arguments, with other tensors in the place of these."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(x, Tensor) else x for x in self._leaves]
        return pytree.tree_unflatten(leaves, self._structure)


def _mark(leaf: Any) -> tuple[Any, ...]:
    """What of an input a graph depends on: the layout of a tensor, the value of anything else."""
    kind = type(leaf)
    if kind in TENSOR_TYPES:
        if not is_simple(leaf):
            raise Refusal("an input that is sparse, conjugated or negated")
        return leaf.dtype, leaf.shape, leaf.stride(), alignment(leaf)
    if kind not in PLAIN_TYPES:
        raise Refusal(f"an input of type {kind.__name__}")
    # 1, True and 1.0 are equal, and so are 0.0 and -0.0
    return kind, repr(leaf) if kind in (float, complex) else leaf


def _switches(device_type: str) -> tuple[Any, ...]:
    """The state of the process that decides which kernels run."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        cuda.matmul.fp32_precision,
        cuda.matmul.allow_fp16_accumulation,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.preferred_blas_library(),
        cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        surrounding(),
        dispatch and dispatch._AttentionBackendRegistry._active_backend,
    )


def check_surroundings() -> None:
    """Refuse where something looks on at every operation, which a replay would hide from it."""
    if torch._C._len_torch_dispatch_stack():
        raise Refusal("inside a dispatch mode")
    if torch._C._len_torch_function_stack():
        from torch.overrides import _get_current_function_mode_stack
        from torch.utils._device import DeviceContext

        if not all(isinstance(m, DeviceContext) for m in _get_current_function_mode_stack()):
            raise Refusal("inside a torch function mode")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Refusal("inside a function transform")
    if torch.autograd.forward_ad._current_level >= 0:
        raise Refusal("forward-mode gradients are recorded")
    if torch.jit.is_tracing():
        raise Refusal("inside torch.jit.trace")
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        raise Refusal("a hook on all modules")


def listed(devices: Iterable[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices)))

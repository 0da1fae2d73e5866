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

# where transformers has the hooks by which models collect what their layers return
OUTPUT_HOOKS = "transformers.utils.output_capturing"


class Call:
    """The inputs of a call, taken apart. Calls with one key can share a graph."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], device_type: str) -> None:
        self._given = args, kwargs
        self.tensors: list[Tensor] = []
        marks = _mark(args, self.tensors), _mark(kwargs, self.tensors)
        devices = {t.device for t in self.tensors}
        if not devices:
            raise Refusal("no tensor among the inputs")
        # the value of a tensor on the CPU would become part of the graph
        if len(devices) > 1 or self.tensors[0].device.type != device_type:
            raise Refusal(f"inputs on {listed(devices)}")
        (self.device,) = devices
        self.key = (self.device, marks, _switches(device_type))

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """The arguments, with other tensors in the place of these."""
        left = iter(tensors)
        leaves, structure = pytree.tree_flatten(self._given, is_leaf=is_no_container)
        leaves = [next(left) if isinstance(x, Tensor) else x for x in leaves]
        return pytree.tree_unflatten(leaves, structure)


def _mark(value: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
    """What of an input a graph depends on: the layout of a tensor, the value of anything else, and
    the containers around them. Tensors are added to the list in the order of `pytree`, which this
    does the work of for the containers that most calls have."""
    kind = type(value)
    if kind in _TENSORS:
        if not is_simple(value):
            raise Refusal("an input that is sparse, conjugated or negated")
        tensors.append(value)
        return value.dtype, value.shape, value.stride(), alignment(value)
    if kind in _VALUES:
        return kind, value
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 and -0.0 are equal
    if kind is dict:
        return dict, tuple(value), *[_mark(v, tensors) for v in value.values()]
    if kind is tuple or kind is list:
        return kind, *[_mark(v, tensors) for v in value]
    leaves, structure = pytree.tree_flatten(value, is_leaf=is_no_container)
    if structure.is_leaf():
        raise Refusal(f"an input of type {kind.__name__}")
    return structure, *[_mark(x, tensors) for x in leaves]


_TENSORS = frozenset(TENSOR_TYPES)
_VALUES = frozenset(PLAIN_TYPES) - {float, complex}


def _switches(device_type: str) -> tuple[Any, ...]:
    """The state of the process that decides which kernels run, most of it as torch.backends asks
    for it: through properties of torch.backends this takes four times as long."""
    state = torch._C
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        torch.get_default_dtype(),
        state._len_torch_function_stack() and torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        state._get_flash_sdp_enabled(),
        state._get_mem_efficient_sdp_enabled(),
        state._get_math_sdp_enabled(),
        state._get_cudnn_sdp_enabled(),
        tuple(state._get_sdp_priority_order()),
        state._get_math_sdp_allow_fp16_bf16_reduction(),
        state._get_fp32_precision_getter("cuda", "matmul"),
        state._get_cublas_allow_fp16_accumulation(),
        state._get_cublas_allow_fp16_reduced_precision_reduction(),
        state._get_cublas_allow_bf16_reduced_precision_reduction(),
        state._get_blas_preferred_backend(),
        state._get_fp32_precision_getter("cuda", "conv"),
        state._get_cudnn_enabled(),
        state._get_cudnn_benchmark(),
        state._get_cudnn_deterministic(),
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
    collector = getattr(sys.modules.get(OUTPUT_HOOKS), "_active_collector", None)
    if collector is not None and collector.get():
        raise Refusal("inside a model that collects what its layers return")


def listed(devices: Iterable[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices)))

"""PyTorch's private names that this library relies on, all of them, under names that explain them.

A name that a later PyTorch removes does not break `import kernelwright`: calling it raises an error
that names it. tests/test_internals.py calls each of them and fails first.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as _module
from torch.utils import _pytree as pytree

__all__ = ["forward_ad", "pytree"]

WANTED: dict[str, bool] = {}  # full name of each, and whether this PyTorch has it


def _named(path: str, instead: Callable[..., Any] | None = None) -> Any:
    """The object of this full name; `instead` in builds that do not have it, such as CPU builds."""
    found: Any = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name, None)
    if found is not None or instead is not None:
        WANTED[path] = found is not None or not torch.backends.cuda.is_built()
        return found if found is not None else instead
    WANTED[path] = False

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"kernelwright: PyTorch {torch.__version__} has no {path}; use a version that this "
            f"one was tested with (2.11 to 2.15), or a newer kernelwright"
        )

    return missing


# modes and transforms that have to see every operation of a call

dispatch_stack: Callable[[], int] = _named("torch._C._len_torch_dispatch_stack")
function_modes: Callable[[], int] = _named("torch._C._len_torch_function_stack")
in_functorch: Callable[[], bool] = _named("torch._C._are_functorch_transforms_active")
any_autocast: Callable[[], bool] = _named("torch._C._is_any_autocast_enabled")
jit_state: Callable[[], Any] = _named("torch._C._get_tracing_state")
_function_mode_stack: Callable[[], list[Any]] = _named(
    "torch.overrides._get_current_function_mode_stack"
)


class _Own(threading.local):
    modes = 0


_own = _Own()


def dispatch_modes() -> int:
    """How many dispatch modes have to see every operation; our own do not count."""
    return dispatch_stack() - _own.modes


@contextmanager
def own_dispatch_mode() -> Iterator[None]:
    """For the time of a dispatch mode of our own, which need not see our kernels."""
    _own.modes += 1
    try:
        yield
    finally:
        _own.modes -= 1


_only_lifts: Callable[[], bool] = _named("torch._C._only_lift_cpu_tensors")
_lift_only: Callable[[bool], None] = _named("torch._C._set_only_lift_cpu_tensors")


@contextmanager
def lifting_cpu_tensors() -> Iterator[None]:
    """Make torch.tensor(..., device="cuda") copy from the host in an operation of its own, which a
    dispatch mode sees."""
    before = _only_lifts()
    _lift_only(True)
    try:
        yield
    finally:
        _lift_only(before)


FakeTensor: Any = _named("torch._subclasses.FakeTensor")
FakeTensorMode: Any = _named("torch._subclasses.FakeTensorMode")
without_fakes: Callable[[], Any] = _named("torch._subclasses.fake_tensor.unset_fake_temporarily")
# whether autograd would run an op of these tensors as the ops that it is made of
decomposes: Callable[..., bool] = _named(
    "torch.utils._python_dispatch.autograd_would_have_decomposed"
)
_undispatched: Callable[[], Any] = _named("torch.utils._mode_utils.no_dispatch")


def fake_like(mode: Any, t: Tensor) -> Tensor:
    """A tensor of the layout of another one, without memory. Made by an op under `mode` it would
    take five times as long."""
    with _undispatched():
        layout = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        made: Tensor = FakeTensor(mode, layout, t.device)
        return made


class _ThreadFlag(threading.local):
    """A truth value of each thread."""

    now = False

    def __bool__(self) -> bool:
        return self.now


_flag, _flag_lock = _ThreadFlag(), threading.Lock()
_flag_users = 0


@contextmanager
def _flagged(value: bool) -> Iterator[None]:
    """For PyTorch before 2.14, where all threads share one flag: meanwhile each has its own."""
    global _flag_users
    where: Any = sys.modules["torch.fx._symbolic_trace"]
    with _flag_lock:
        if not _flag_users:
            where._is_fx_tracing_flag = _flag
        _flag_users += 1
    before, _flag.now = _flag.now, value
    try:
        yield
    finally:
        _flag.now = before
        with _flag_lock:
            _flag_users -= 1
            if not _flag_users and where._is_fx_tracing_flag is _flag:
                where._is_fx_tracing_flag = False


def refusing_compiled_functions() -> AbstractContextManager[None]:
    """Have functions of torch.compile raise in this thread: they would compile what they see under
    a mode of ours, and keep it. To them it is as if torch.fx traced."""
    where: Any = sys.modules["torch.fx._symbolic_trace"]
    found: AbstractContextManager[None] = getattr(where, "_is_fx_tracing_context", _flagged)(True)
    return found


_to_functional: Callable[..., Any] = _named("torch._to_functional_tensor")
_from_functional: Callable[..., Any] = _named("torch._from_functional_tensor")
_enable_functionalization: Callable[..., Any] = _named("torch._enable_functionalization")
_disable_functionalization: Callable[..., Any] = _named("torch._disable_functionalization")
_sync: Callable[..., Any] = _named("torch._sync")


def functional(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`function` without writing to tensors, for make_fx. Unlike torch.func.functionalize, what it
    calls may use autograd."""

    def run(*tensors: Any) -> list[Any]:
        wrapped = list(map(_to_functional, tensors))
        _enable_functionalization(reapply_views=True)
        try:
            results = function(*wrapped)
        finally:
            _disable_functionalization()
        for result in results:
            _sync(result)
        if any(map(_written, wrapped)):
            raise RuntimeError("it writes to its inputs")
        return list(map(_from_functional, results))

    return run


_written: Callable[..., bool] = _named("torch._functionalize_has_data_mutation")


_saving_hooks: Callable[..., Any] = _named("torch._C._autograd._top_saved_tensors_default_hooks")


def saves_through_hooks() -> bool:
    """Whether what autograd saves goes through hooks, such as those of checkpointing."""
    return _saving_hooks(True) is not None


_backward_task: Callable[[], int] = _named("torch._C._current_graph_task_id")
_keeps_graph: Callable[[], bool] = _named("torch._C._autograd._get_current_graph_task_keep_graph")


def in_backward() -> bool:
    """Whether this thread is running a backward: checkpointing runs forwards there."""
    return _backward_task() != -1


def keeps_graph() -> bool:
    """Whether the running backward may run again (`retain_graph=True`)."""
    return _keeps_graph()


def only_default_devices() -> bool:
    """Whether every torch function mode around this call is a default device."""
    from torch.utils._device import DeviceContext

    return all(isinstance(mode, DeviceContext) for mode in _function_mode_stack())


def in_forward_ad() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def in_jit_trace() -> bool:
    return jit_state() is not None


def all_modules_hooked() -> bool:
    """Whether a hook is registered that sees every module of the process being called."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def needs_torch_ops() -> bool:
    """Whether something must see PyTorch's own operations, which our kernels would hide: function
    transforms, forward-mode gradients, torch.jit.trace, global module hooks."""
    return (
        in_functorch()
        or forward_ad._current_level >= 0
        or jit_state() is not None
        or all_modules_hooked()
    )


# the switches that decide, with the operands of a call, which kernel PyTorch runs; torch.backends
# has public properties for most, which take four times as long to read

_fp16_accumulation = _named("torch._C._get_cublas_allow_fp16_accumulation")
_fp16_reduction = _named("torch._C._get_cublas_allow_fp16_reduced_precision_reduction")
_bf16_reduction = _named("torch._C._get_cublas_allow_bf16_reduced_precision_reduction")
_blas_library = _named("torch._C._get_blas_preferred_backend")
_fp32_precision = _named("torch._C._get_fp32_precision_getter")
_sm_carveout = _named("torch._C._get_sm_carveout_experimental")
_tunable_gemm = _named("torch._C._cuda_tunableop_is_enabled", bool)
_cudnn_attention = _named("torch._C._get_cudnn_sdp_enabled")
_flash_attention = _named("torch._C._get_flash_sdp_enabled")
_efficient_attention = _named("torch._C._get_mem_efficient_sdp_enabled")
_math_attention = _named("torch._C._get_math_sdp_enabled")
_math_reduction = _named("torch._C._get_math_sdp_allow_fp16_bf16_reduction")
_attention_order = _named("torch._C._get_sdp_priority_order")
_attention_choice = _named("torch._fused_sdp_choice")
_cudnn = _named("torch._C._get_cudnn_enabled")
_cudnn_benchmark = _named("torch._C._get_cudnn_benchmark")
_cudnn_deterministic = _named("torch._C._get_cudnn_deterministic")


def attention_kernels() -> tuple[bool, bool, bool]:
    """Whether cuDNN's, the flash and the memory-efficient attention are allowed."""
    return _cudnn_attention(), _flash_attention(), _efficient_attention()


def is_captured() -> bool:
    """Whether the current stream is being captured, by whomever."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_has_context: Callable[[int], bool] = _named("torch._C._cuda_hasPrimaryContext", lambda i: False)
_order_is_found = False


def find_attention_order() -> None:
    """Have PyTorch find its order of attention kernels for this GPU, which it does at the first
    attention of a process otherwise: what was learned before would hold for another order."""
    global _order_is_found
    if _order_is_found or dispatch_stack() or not torch.cuda.is_initialized() or is_captured():
        return
    # on a GPU in use: a tensor on another would take half a gigabyte there for its context
    devices = (torch.cuda.current_device(), *range(torch.cuda.device_count()))
    used = next(filter(_has_context, devices), None)
    if used is None:
        return
    _order_is_found = True
    x = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=f"cuda:{used}")
    _attention_choice(x, x, x)


def attention_switches() -> tuple[Any, ...]:
    return (*attention_kernels(), _math_attention(), tuple(_attention_order()), _math_reduction())


def attention_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    grouped: bool | None = None,
) -> SDPBackend:
    """The kernel that F.scaled_dot_product_attention takes for these, over [batch, heads, tokens,
    dim]; heads of the query may share those of key and value, which it is told (`enable_gqa`)
    unless `grouped` is False."""
    shared = query.shape[1] != key.shape[1] if grouped is None else grouped
    how = {"scale": scale, "enable_gqa": shared}
    return SDPBackend(_attention_choice(query, key, value, mask, 0.0, False, **how))


def added_where_false(kernel: SDPBackend, dtype: torch.dtype, device: torch.device) -> float | None:
    """What a kernel of PyTorch's attention adds to a product where a mask of truth values is
    False; None if it is another number than those known. The row of a mask that is False
    everywhere tells: minus infinity gives 0 or NaN there, and cuDNN's -65504 the mean of all
    values in torch 2.11."""
    return _added_where_false(kernel, dtype, device, F.scaled_dot_product_attention)


@functools.lru_cache
def _added_where_false(
    kernel: SDPBackend, dtype: torch.dtype, device: torch.device, attend: Callable[..., Tensor]
) -> float | None:
    x = torch.linspace(-1, 1, 16 * 64, dtype=dtype, device=device).view(1, 1, 16, 64)
    mask = torch.ones(16, 16, dtype=torch.bool, device=device).tril(-1)
    try:
        with sdpa_kernel(kernel), torch.no_grad():
            wanted = attend(x, x, x, attn_mask=mask)
            for number in (-math.inf, -65504.0):
                added = torch.zeros(16, 16, dtype=dtype, device=device).masked_fill(~mask, number)
                got = attend(x, x, x, attn_mask=added)
                if torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0)):
                    return number
    except RuntimeError:  # this kernel does not take these shapes
        pass
    return None


def gemm_switches() -> tuple[Any, ...]:
    """The switches of 16-bit GEMMs; float32 GEMMs also have `float32_switches`."""
    return (
        _fp16_accumulation(),
        _fp16_reduction(),
        _bf16_reduction(),
        _blas_library().value,  # the enum itself is slow to hash
        torch.are_deterministic_algorithms_enabled(),
        _sm_carveout(),
        _tunable_gemm(),
    )


def float32_switches() -> tuple[Any, ...]:
    return _fp32_precision("cuda", "matmul"), _fp32_precision("cuda", "conv")


def convolution_switches() -> tuple[Any, ...]:
    return _cudnn(), _cudnn_benchmark(), _cudnn_deterministic()


_convolution_backend: Callable[..., Any] = _named("torch._C._select_conv_backend")
_CUDNN_CONVOLUTION: Any = _named("torch._C._ConvBackend.Cudnn")


def adds_bias_apart(x: Tensor, weight: Tensor, bias: Tensor, *how: Any) -> bool:
    """Whether aten.convolution with these arguments is cuDNN's kernel, which takes no bias, and an
    addition. The tensors may be fake ones."""
    if x.ndim != weight.ndim or x.device.type != "cuda":
        return False
    with getattr(x, "fake_mode", nullcontext()):
        return _convolution_backend(x, weight, bias, *how) == _CUDNN_CONVOLUTION


def linear_adds_bias_apart(x: Tensor) -> bool:
    """Whether F.linear of such rows is a product without a bias, and an addition."""
    flattened = os.environ.get("TORCH_LINEAR_FLATTEN_3D") == "1"
    return x.ndim == 3 and not x.is_contiguous() and not flattened


def native_kernels() -> bool:
    """Whether PyTorch, from 2.13 on, replaces kernels of its own by those of nvidia-cutlass-dsl:
    that of F.rms_norm is QuACK's then. It does on capability 9, 10 and 12."""
    native = sys.modules.get("torch._native.cutedsl_utils")
    asked = ("runtime_available", "_version_is_ok", "check_native_jit_disabled")
    available, fits, disabled = (getattr(native, name, None) for name in asked)
    if available is None or fits is None or disabled is None:
        return False
    if not (available() and fits()) or disabled():
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10, 12)


DROPOUT: type = _named("torch.nn.modules.dropout._DropoutNd")  # the base of all dropouts

# the dispatcher

parse_schema: Callable[[str], Any] = _named("torch._C.parse_schema")
any_requires_grad: Callable[..., bool] = _named("torch._C._any_requires_grad")
below_autograd: Callable[[], Any] = _named("torch._C._AutoDispatchBelowAutograd")
after_autograd: Any = _named("torch._C._after_autograd_keyset")
# whether an incoming gradient is batched: torch.autograd.grad(..., is_grads_batched=True)
is_batched_gradient: Callable[[Tensor], bool] = _named(
    "torch._C._functorch.is_legacy_batchedtensor"
)


def schema_of(overload: Any) -> Any:
    return overload._schema


# GEMMs that have no public name

scaled_mm: Callable[..., Any] = _named("torch._scaled_mm")
addmm_activation: Callable[..., Any] = _named("torch._addmm_activation")

# memory and streams

raw_stream: Callable[[int], int] = _named("torch._C._cuda_getCurrentRawStream", lambda device: 0)
storage_uses: Callable[[int], int] = _named("torch._C._storage_Use_Count")
# a storage of so many bytes at an address of a device, which it neither keeps alive nor frees
unowned_storage: Callable[[int, torch.device, int], torch.UntypedStorage] = _named(
    "torch._C._construct_storage_from_data_pointer"
)
end_allocating_to_pool: Callable[..., None] = _named("torch._C._cuda_endAllocateToPool", print)
release_pool: Callable[..., None] = _named("torch._C._cuda_releasePool", print)


_tensor_guards: Callable[..., Any] = _named("torch._C._dynamo.guards.TensorGuards")


def layout_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """What says whether tensors have the classes, dtypes, devices, shapes and strides of these, in
    one call for all. It may say no for another reason, such as `requires_grad`."""
    return _tensor_guards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    ).check


def view_base(t: Tensor) -> Tensor:
    """The base of a view; the tensor itself if it is not a view."""
    return t if t._base is None else t._base


# torch.compile


def mark_constant(function: Any) -> Any:
    """Make torch.compile treat what `function` returns as a constant. torch.compiler has a
    decorator that sets the same mark, but it imports Dynamo and Triton."""
    function._dynamo_marked_constant = True
    return function


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def forget_compiled(module: nn.Module) -> None:
    """Undo `module.compile()`."""
    module._compiled_call_impl = None


def compile_counters() -> Any:
    """What Dynamo counts: graphs, and graph breaks with their reasons."""
    from torch._dynamo.utils import counters

    return counters


def has_compile_option(name: str) -> bool:
    """Whether torch.compile takes this among its options."""
    from torch._inductor import list_options

    return name in list_options()


def warms_up_cudagraphs(device: torch.device) -> bool:
    """Whether Inductor is warming up a CUDA graph ("reduce-overhead"), on a stream of its own:
    memory that is allocated now belongs to the graph."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda":
        return False
    containers = getattr(trees.local, "tree_manager_containers", {})
    manager = getattr(containers.get(device.index or 0), "tree_manager", None)
    return manager is not None and manager.stream == torch.cuda.current_stream(device)

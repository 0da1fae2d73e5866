"""Models with random weights: what `from_pretrained` would return, without a checkpoint.

Weights of ones and zeros hide mistakes: a norm weight that is never read, a gate that shuts off its
branch. So every parameter is random, scaled so that activations neither grow nor fade with depth.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SPREAD = 0.1  # standard deviation of norm weights around 1, and of biases around 0
TABLE_SPREAD = 0.5  # the same of modulation tables around 0

# sharper than the usual 1: uniform attention would average thousands of tokens to almost nothing
QUERY_KEY_GAIN = 1.5
QUERY_KEY = re.compile(
    r"\b(to_[qk]|add_[qk]_proj|[qk]_proj|norm(_added)?_[qk]|[qk]_norm|(query|key)_norm|"
    r"query_key_value)\.weight$"
)
# norms that multiply with 1 + weight
AROUND_ZERO = re.compile(r"Gemma\d?RMSNorm|Krea2RMSNorm")
# T5 does not divide its scores by the square root of its head_dim, 64
T5_QUERY = re.compile(r"\bSelfAttention\.q\.weight$")


def random_model(
    library: str,
    class_name: str,
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int,
) -> nn.Module:
    """A model of `library` with random weights in eval mode, drawn on `device`.

    A seed gives the same weights on one kind of device, in every dtype up to rounding.
    """
    device = torch.device(device)
    cls = getattr(importlib.import_module(library), class_name)

    def construct() -> nn.Module:
        if library == "transformers":
            return cls._from_config(cls.config_class(**config), dtype=dtype)
        return cls(**config)

    if device.type == "meta":
        return empty_model(construct, dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(path: str, module: nn.Module, parameter: Tensor) -> Tensor:
        centre, spread = _law(path, module, parameter)
        noise = torch.randn(
            parameter.shape, generator=generator, device=device, dtype=torch.float32
        )
        return noise.mul_(spread).add_(centre)

    from accelerate import init_empty_weights

    with _constructing(dtype), init_empty_weights(include_buffers=False):
        model = construct()
    return _settle(model, dtype, device, draw)


def empty_model(construct: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """The model of `construct` on the meta device: structure and dtypes, without memory."""
    with _constructing(dtype), torch.device("meta"), _WithoutFilling():
        model = construct()
    return _settle(model, dtype, torch.device("meta"), lambda path, module, parameter: parameter)


@contextmanager
def _constructing(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default, as `from_pretrained` does; keep the caller's random state."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(before)


_FILLING = frozenset(
    (
        *(nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_),
        *(Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_),
    )
)


class _WithoutFilling(TorchFunctionMode):
    """Leaves out what layers do to the values of meta tensors, which have none: a quarter of the
    time that building such a model takes."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _FILLING:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return function(*args, **(kwargs or {}))


def _settle(
    model: Any,
    dtype: torch.dtype,
    device: torch.device,
    value: Callable[[str, nn.Module, Tensor], Tensor],
) -> nn.Module:
    """Give every parameter its value, and everything the dtype that `from_pretrained` gives it."""
    in_float32 = _kept_in_float32(model, dtype)

    def dtype_of(path: str) -> torch.dtype:
        return torch.float32 if in_float32.intersection(path.split(".")) else dtype

    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            path = f"{prefix}.{name}" if prefix else name
            data = value(path, module, parameter.detach()).to(dtype_of(path))
            module.register_parameter(name, nn.Parameter(data, parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            # from_pretrained leaves buffers that no checkpoint holds as constructed
            loaded = buffer.is_floating_point() and name not in module._non_persistent_buffers_set
            kind = dtype_of(f"{prefix}.{name}") if loaded else buffer.dtype
            setattr(module, name, buffer.to(device, kind))
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model.eval()


def _kept_in_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """Names of modules and parameters that the library does not cast."""
    names = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not hasattr(model, "_keep_in_fp32_modules_strict"):  # diffusers
        return names
    strict = set(model._keep_in_fp32_modules_strict or ())
    return strict | names if dtype == torch.float16 else strict


def _law(path: str, module: nn.Module, parameter: Tensor) -> tuple[float, float]:
    """Mean and standard deviation to draw a parameter with."""
    gain = QUERY_KEY_GAIN if QUERY_KEY.search(path) else 1.0
    if path.endswith("bias"):
        return 0.0, SPREAD
    if "Norm" in (kind := type(module).__name__):
        return gain - 1 if AROUND_ZERO.match(kind) else gain, gain * SPREAD
    if path.endswith("weight"):
        width = parameter[0].numel()
        if isinstance(module, nn.Embedding):
            # between 1, for the residual stream, and 1 / sqrt(width), for a head tied to it
            return 0.0, width**-0.25
        gain = QUERY_KEY_GAIN / 8 if T5_QUERY.search(path) else gain
        return 0.0, gain / width**0.5
    return 0.0, TABLE_SPREAD

"""Gated units and the feed-forwards around them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...ops.gelu import gelu
from ...ops.glu import GELU_MUL, geglu, silu_mul, swiglu
from ...ops.linear import linear_gelu

# the GELUs of transformers
GELU_FORMS = {
    "GELUTanh": "tanh",
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "GELUActivation": "none",
}


class SwiGLUMLP(nn.Module):
    """LlamaMLP and its twins: down(SiLU(gate(x)) * up(x))."""

    can_torch_compile = True
    has_backward = True

    act_fn: Any
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if is_silu(self.act_fn) and not hooked(self.act_fn) and gate.dtype == up.dtype:
            return self.down_proj(silu_mul(gate, up))
        return self.down_proj(self.act_fn(gate) * up)


class GemmaMLP(nn.Module):
    """GemmaMLP and its twins: down(GELU(gate(x)) * up(x)), GELU in either form."""

    can_torch_compile = True
    has_backward = True

    act_fn: Any
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        form = gelu_form(self.act_fn)
        if form is not None and not hooked(self.act_fn) and gate.dtype == up.dtype:
            return self.down_proj(GELU_MUL.run(gate, up, form == "tanh"))
        return self.down_proj(self.act_fn(gate) * up)


class GEGLU(nn.Module):
    """diffusers.models.activations.GEGLU: first * GELU(second) of a projection."""

    can_torch_compile = True
    has_backward = True

    proj: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return geglu(self.proj(hidden_states), approximate=False)


class SwiGLU(nn.Module):
    """diffusers.models.activations.SwiGLU: first * SiLU(second) of a projection."""

    can_torch_compile = True
    has_backward = True

    proj: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        return swiglu(self.proj(hidden_states), gate="second")


class GEGLUMLP(nn.Module):
    """diffusers.models.attention.FeedForward: an activated or gated projection, then a Linear."""

    can_torch_compile = True
    has_backward = True

    net: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        first, *rest = self.net
        for layer in (lambda x: activated(first, x), *rest):
            hidden_states = layer(hidden_states)
        return hidden_states


class GeLU(nn.Module):
    """transformers' GELUActivation: GELU, the erf form"""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, approximate=False)


class GeluTanh(nn.Module):
    """transformers' GELUTanh, NewGELUActivation and FastGELUActivation: GELU, the tanh form"""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, approximate=True)


class SiluAndMul(nn.Module):
    """SiLU(first) * second"""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x)


class GeluAndMul(nn.Module):
    """GELU(first) * second, the erf form"""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return geglu(x, approximate=False, gate="first")


class GeluTanhAndMul(nn.Module):
    """GELU(first) * second, the tanh form"""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return geglu(x, approximate=True, gate="first")


def is_silu(activation: Any) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def gelu_form(activation: Any) -> str | None:
    """Which GELU of torch or transformers an activation is, "tanh" or "none" as torch names the erf
    form; None if it is neither."""
    if type(activation) is nn.GELU:
        return activation.approximate
    return GELU_FORMS.get(type(activation).__name__)


def hooked(module: Any) -> bool:
    """Whether a module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def activated(first: Any, x: Tensor) -> Tensor:
    """The first part of a FeedForward, fused where its class is known."""
    place, name = type(first).__module__, type(first).__name__
    proj: Any = getattr(first, "proj", None)
    # an adapter around the Linear, or a hook on it, has to run
    bare = type(proj) is nn.Linear and not hooked(proj)
    if place != "diffusers.models.activations" or not bare:
        return first(x)
    if name == "GEGLU":
        return geglu(proj(x), approximate=False)
    if name == "SwiGLU":
        return swiglu(proj(x), gate="second")
    if name == "GELU":
        return linear_gelu(x, proj.weight, proj.bias, approximate=first.approximate == "tanh")
    return first(x)

"""A norm and the feed-forward after it as one module, for transformers' module fusion.

transformers builds `{Kernel}Layout` in place of the modules that a kernel fuses, before it loads
the checkpoint; `conversion_mapping` says which weights become which. `kernelize` then gives the
layout the forward of `{Kernel}`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...ops.glu import swiglu
from .gated import hooked, is_silu
from .norms import scaled

MLP = r"\.mlp\."


class RMSNormSwiGLUMLP(nn.Module):
    """LlamaRMSNorm, then LlamaMLP with gate and up in one GEMM: down(SiLU(gate(y)) * up(y))."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor
    variance_epsilon: float
    act_fn: Any
    gate_up_proj: Any
    down_proj: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        packed = self.gate_up_proj(scaled(hidden_states, self.weight, self.variance_epsilon))
        if is_silu(self.act_fn) and not hooked(self.act_fn):
            return self.down_proj(swiglu(packed))
        gate, up = packed.chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class _Conversions:
    """`conversion_mapping`, made when it is read: importing a kernel must not need transformers."""

    def __get__(self, instance: Any, owner: type) -> list[Any]:
        from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming

        joined = [
            WeightConverter(
                source_patterns=[rf"{MLP}gate_proj\.{part}", rf"{MLP}up_proj\.{part}"],
                target_patterns=f".post_attention_layernorm.gate_up_proj.{part}",
                operations=[Concatenate(dim=0)],
            )
            for part in ("weight", "bias")
        ]
        return [
            *joined,
            WeightRenaming(rf"{MLP}down_proj\.", ".post_attention_layernorm.down_proj."),
        ]


class RMSNormSwiGLUMLPLayout(nn.Module):
    """The parameters of `post_attention_layernorm` and `mlp` as one module."""

    conversion_mapping = _Conversions()

    def __init__(self, norm: Any, mlp: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
        self.act_fn, self.down_proj = mlp.act_fn, mlp.down_proj
        gate = mlp.gate_proj
        self.gate_up_proj = nn.Linear(
            gate.in_features,
            2 * gate.out_features,
            bias=gate.bias is not None,
            device=gate.weight.device,
            dtype=gate.weight.dtype,
        )

    # without one, transformers gives a layout a forward that returns None, and a model that is not
    # kernelized would compute nonsense
    forward = RMSNormSwiGLUMLP.forward

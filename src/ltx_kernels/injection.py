"""The functions of the LTX-Video kernels example, on top of `inject`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kernelwright.inject.engine import inject
from kernelwright.inject.fusions import Fusions
from kernelwright.inject.identify.norm_kinds import Key, Norm, describe, key
from kernelwright.inject.identify.targets import parts_of
from kernelwright.inject.recipes.ltx import Rotary, attend
from kernelwright.inject.runtime import forwards


def inject_optimized_kernels(pipe: Any) -> dict[str, int]:
    """`kernelwright.inject(pipe)`, and how many attention modules and norms of its transformer
    take part. The attention processors stay what they were; `kernelwright.restore` undoes it."""
    report = inject(pipe)
    names = {part.name for part in parts_of(pipe)}
    counted = "transformer" if "transformer" in names else ""
    return {
        "attention_processors": report.count("LTXAttention", counted),
        "rmsnorm_modules": report.count("RMSNorm", counted),
    }


def patch_rmsnorm_modules(model: nn.Module) -> int:
    """Have every RMSNorm of a model run in one kernel; returns how many do."""
    norms = [m for m in model.modules() if type(m).__name__ == "RMSNorm"]
    if norms and not any(forwards.installed(m) for m in norms):
        inject(model, only="RMSNorm")
    return sum(forwards.installed(m) is not None for m in norms)


class OptimizedLTXVideoAttnProcessor:
    """An attention processor for `set_processor`: QK-norm and RoPE in one launch, with the bits of
    diffusers' own."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, numerics: str = "exact") -> None:
        self._norms: dict[Key, Norm | str] = {}
        self._fuse = Fusions(numerics, None, self._norms)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> Tensor:
        for norm in (attn.norm_q, attn.norm_k):
            if key(norm) not in self._norms:
                self._norms[key(norm)] = describe(norm)
        return attend(
            self._fuse,
            self,
            attn,
            hidden_states,
            encoder_hidden_states,
            attention_mask,
            image_rotary_emb,
        )

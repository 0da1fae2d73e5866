"""What all places share: how an injection is to be fused, and what a norm of the model is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..fp8.layers import Fp8Layers
from ..identify import norm_kinds
from ..identify.norm_kinds import Norm
from ..reuse.packed_gemm import SameBits
from ..reuse.prompt_values import Prompts, Shared
from ..reuse.rope_tables import Tables
from ..runtime.forwards import hooked
from ..runtime.sites import NotHere, declined
from ..state.hooks import is_plain
from ..state.tensor_samples import Contents

Part = Tensor | None
CHANGES_DTYPE = "eager changes the dtype here"


@dataclass(frozen=True, eq=False)
class Places:
    """How the places of one injection are fused: `numerics` and `backend` as `inject` was given
    them, `norms` the kinds of norm found in the model."""

    numerics: str
    backend: str | None
    norms: dict[norm_kinds.Key, Norm | str]
    tables: Tables = field(default_factory=Tables)
    prompts: Prompts = field(init=False)
    fp8_layers: Fp8Layers | None = None
    contents: Contents = field(default_factory=Contents)
    masks: Shared = field(default_factory=Shared)
    modulations: Shared = field(default_factory=Shared)
    same_bits: SameBits = field(default_factory=SameBits)
    # the same of each module, until one of the modules around it changes
    _seen: WeakKeyDictionary[nn.Module, Norm | str] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", Prompts(self.contents))

    def __deepcopy__(self, memo: Any) -> Places:
        return self

    def look_again(self, root: nn.Module) -> None:
        """A module is not what it was: what its norms are is found out anew."""
        for module in root.modules():
            self._seen.pop(module, None)

    @property
    def exact(self) -> bool:
        return self.numerics == "exact"

    def _how(self, x: Tensor, chain: str | None) -> tuple[str | None, str | None]:
        """The exact mode and the backend of an op. On a GPU an exact mode asks for its kernel by
        name, so that an order it does not have is said and not passed over."""
        if self.backend == "cuda" and x.device.type == "cpu":
            raise NotHere(
                'inject: backend is "cuda", but the model runs on the CPU; move it to a GPU, or '
                "leave backend out"
            )
        if self.numerics != "exact":
            return None, self.backend
        if torch.compiler.is_compiling():  # nobody could hear it
            return chain, self.backend
        return chain, self.backend or ("cuda" if x.is_cuda else None)

    def _read(
        self,
        name: str,
        module: Any,
        x: Tensor,
        *parts: Part,
        wide: bool = False,
        bare: bool = True,
    ) -> tuple[Norm, Part, Part, float] | None:
        """The norm that `module` is, its weight, bias and eps, if a kernel may stand for it."""
        if torch.compiler.is_compiling():
            norm = self.norms.get(norm_kinds.key(module))
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        else:
            norm = self._seen.get(module)
            if norm is None:
                norm = self._seen[module] = _norm_of(module)
            own = module._parameters
            weight, bias = own.get("weight"), own.get("bias")
            if bare and hooked(module):
                declined(name, "a hook wants to see the norm being called")
                return None
        if not isinstance(norm, Norm):
            declined(name, norm or f"{type(module).__name__} is no norm the kernels know")
            return None
        if not wide:
            dtype = x.dtype
            # a norm that computes in float32 takes weights of any dtype
            if weight is not None and weight.dtype != dtype and norm.chain != "wan":
                declined(name, CHANGES_DTYPE)
                return None
            for part in parts:
                if part is not None and part.dtype != dtype:
                    declined(name, CHANGES_DTYPE)
                    return None
        eps = getattr(module, norm.eps)
        if not isinstance(eps, float | int | None):
            declined(name, f"its {norm.eps} is a {type(eps).__name__}")
            return None
        return norm, weight, bias, norm_kinds.default_eps(x.dtype, x.device) if eps is None else eps


def _norm_of(module: nn.Module) -> Norm | str:
    if not norm_kinds.looks_like_norm(module):
        return f"{type(module).__name__} is no norm the kernels know"
    return norm_kinds.describe(module)


def is_linear(module: Any) -> bool:
    """A plain Linear that may be read around: no adapter, no hook, no quantised weight."""
    return (
        is_plain(module, nn.Linear)
        and type(module._parameters.get("weight")) is nn.Parameter
        and not hooked_now(module)
    )


def hooked_now(module: nn.Module) -> bool:
    return not torch.compiler.is_compiling() and hooked(module)


def modulated(x: Tensor, scale: Part, shift: Part) -> Tensor:
    """x * (1 + scale) + shift"""
    if scale is not None:
        x = x * (1 + scale)
    return x if shift is None else x + shift

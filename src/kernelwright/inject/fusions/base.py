"""What all fusion sites share: numerics, backend and caches of an injection, and its norms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...backends.triton import interpreting
from ..fp8.layers import Fp8Layers
from ..identify import norm_kinds
from ..identify.norm_kinds import Norm
from ..reuse.packed_gemm import SameBits
from ..reuse.programs import Programs
from ..reuse.prompt_values import PerForwardCache, Prompts
from ..reuse.rope_tables import Tables
from ..runtime import model_run
from ..runtime.forwards import hooked
from ..runtime.sites import BackendUnavailable, declined
from ..state.hooks import is_plain
from ..state.tensor_samples import TensorSamples

Part = Tensor | None
CHANGES_DTYPE = "eager changes the dtype here"


@dataclass(frozen=True, eq=False)
class BaseFusions:
    """Settings and caches of one injection: `numerics` and `backend` as given to `inject`; `norms`
    are the kinds of norm found in the model."""

    numerics: str
    backend: str | None
    exact: bool = field(init=False)
    norms: dict[norm_kinds.Key, Norm | str]
    tables: Tables = field(default_factory=Tables)
    prompts: Prompts = field(init=False)
    fp8_layers: Fp8Layers | None = None
    samples: TensorSamples = field(default_factory=TensorSamples)
    states: model_run.States = field(default_factory=WeakKeyDictionary)
    masks: PerForwardCache = field(default_factory=PerForwardCache)
    modulations: PerForwardCache = field(default_factory=PerForwardCache)
    same_bits: SameBits = field(default_factory=SameBits)
    # layouts of query, key, value and mask, and whether a kernel without copies has eager's bits
    attention_layouts: dict[Any, bool] = field(default_factory=dict)
    # layouts of tokens and caches, and whether the kernel that decodes into a cache suits them
    cache_layouts: dict[Any, bool] = field(default_factory=dict)
    programs: Programs = field(init=False)
    # the norm that each module is, until a module around it changes
    _norm_of_module: WeakKeyDictionary[nn.Module, Norm | str] = field(
        default_factory=WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact", self.numerics == "exact")
        object.__setattr__(self, "prompts", Prompts(self.samples))
        programs = Programs(self.exact, self.fp8_layers, self.prompts, self.same_bits)
        object.__setattr__(self, "programs", programs)

    def __deepcopy__(self, memo: Any) -> BaseFusions:
        return self

    @property
    def may_sum_otherwise(self) -> bool:
        """Whether kernels of ours may take the place of cuBLAS's, which sum in another order."""
        return not self.exact and self.fp8_layers is None and self.backend in (None, "cuda")

    def at_hand(self, *layers: Any) -> bool:
        """Whether the 16-bit weights of these layers are where their inputs are; fetches those that
        have left the GPU since their layers run in fp8."""
        return self.fp8_layers is None or self.fp8_layers.fetch(*layers)

    def forget_norms(self, root: nn.Module) -> None:
        """Identify the norms inside `root` again: it has changed."""
        for module in root.modules():
            self._norm_of_module.pop(module, None)

    def _exact_and_backend(self, x: Tensor, chain: str | None) -> tuple[str | None, str | None]:
        """The exact mode and the backend of an op. On a GPU, exact mode requests CUDA by name: an
        op then raises where it has no kernel for that order, and does not fall back."""
        named = self.backend is not None and self.backend != "torch"
        if named and x.device.type == "cpu" and not (self.backend == "triton" and interpreting()):
            raise BackendUnavailable(
                f'inject: backend is "{self.backend}", but the model runs on the CPU; move it to a '
                "GPU, or leave backend out"
            )
        if not self.exact:
            return None, self.backend
        # an error in a trace could not fall back to eager
        if self.backend is None and x.is_cuda and not torch.compiler.is_compiling():
            return chain, "cuda"
        return chain, self.backend

    def _norm_operands(
        self,
        name: str,
        module: Any,
        x: Tensor,
        *parts: Part,
        float32: bool = False,
        check_hooks: bool = True,
    ) -> tuple[Norm, Part, Part, float] | None:
        """The norm, weight, bias and eps of `module`; None if a kernel may not replace it."""
        if torch.compiler.is_compiling():
            norm = self.norms.get(norm_kinds.key(module))
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        else:
            norm = self._norm_of_module.get(module)
            if norm is None:
                norm = self._norm_of_module[module] = _identify(module)
            own = module._parameters
            weight, bias = own.get("weight"), own.get("bias")
            if check_hooks and hooked(module):
                declined(name, "a hook is on its norm")
                return None
        if not isinstance(norm, Norm):
            declined(name, norm or f"no kernel for the norm {type(module).__name__}")
            return None
        if not float32:
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


def _identify(module: nn.Module) -> Norm | str:
    if not norm_kinds.looks_like_norm(module):
        return f"no kernel for the norm {type(module).__name__}"
    return norm_kinds.describe(module)


def is_linear(module: Any) -> bool:
    """A plain Linear that need not be called: no adapter, no hook, no quantised weight."""
    return (
        is_plain(module, nn.Linear)
        and type(module._parameters.get("weight")) is nn.Parameter
        and not hooked_now(module)
    )


def hooked_now(module: nn.Module) -> bool:
    return not torch.compiler.is_compiling() and hooked(module)


def eager_modulate(x: Tensor, scale: Part, shift: Part) -> Tensor:
    """x * (1 + scale) + shift"""
    if scale is not None:
        x = x * (1 + scale)
    return x if shift is None else x + shift

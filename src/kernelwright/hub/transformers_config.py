"""The Hub package as a KernelConfig of transformers, which asks for layers by their names."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import KernelConfig

from .layer_classes import EXACT, FUSED_MLP, LAYER_NAME, TRANSFORMERS, is_served, keeps_bits
from .layer_mapping import REPOSITORY
from .package import VERSION

NUMERICS = ("exact", "fused")


def kernel_config(
    package: Path | None = None,
    *,
    numerics: str = "exact",
    rotary: bool = False,
    fused_mlps: str | None = None,
    repo_id: str = REPOSITORY,
    version: int = VERSION,
    trust_remote_code: bool = False,
) -> Any:
    """The package for a model of transformers: `from_pretrained(..., use_kernels=True,
    kernel_config=kernel_config(package))`, or `model.set_use_kernels(True, kernel_config(package))`
    for a model that exists already. transformers takes local kernels on GPUs only.

    Args:
        package: a folder that `build` wrote; None takes `version` of `repo_id` on the Hub.
        numerics: "exact" keeps the bits of eager: RMSNorm, and GELU where it is F.gelu; "fused"
            rounds once inside a kernel, and serves the other forms of GELU too.
        rotary: replace RoPE as well, with "fused": for all models of a family in this process,
            since transformers has one function per family.
        fused_mlps: where the decoder layers are ("model.layers.*"), to make each norm and the
            feed-forward after it one module, with gate and up in one GEMM. With "fused", and in
            `from_pretrained` only, since weights are joined while they are loaded. transformers
            keeps the change for all later models of the class in this process.
        trust_remote_code: load from `repo_id` although the Hub does not list its publisher as
            trusted.

    The other feed-forwards have no names in transformers, and SiLU, QuickGELU, RMSNormGated and
    RMSNormZeroCentered have no layer in the package; `kernelize` replaces the feed-forwards too.
    """
    if numerics not in NUMERICS:
        raise ValueError(f"numerics is {numerics!r}, expected one of {NUMERICS}")
    if numerics == "exact" and (rotary or fused_mlps):
        raise ValueError("rotary and fused_mlps need numerics='fused': they round otherwise")
    names = dict(EXACT if numerics == "exact" else TRANSFORMERS)
    if rotary:
        names["rotary_pos_emb"] = "RotaryPosEmb"
    remote = (repo_id, {"version": version, "trust_remote_code": trust_remote_code})
    return PackageConfig(package, names, remote, fused_mlps)


class PackageConfig(KernelConfig):
    """Layers of a package, by the names that transformers has for them.

    transformers refuses a config with a name that the model lacks, and modifies the config that it
    is given. So each model gets a config of its own, with the names that the model has.
    """

    def __init__(
        self,
        package: Path | None,
        names: Mapping[str, str],
        remote: tuple[str, dict[str, Any]],
        fused_mlps: str | None = None,
    ) -> None:
        self.local = package is not None

        def place(layer: str) -> Any:
            if package is not None:
                return f"{Path(package).resolve()}:{layer}"
            return f"{remote[0]}:{layer}", remote[1]

        self.layers = dict(names)
        self.places = {name: place(layer) for name, layer in names.items()}
        asked: dict[Any, Any] = dict(self.places)
        if fused_mlps is not None:
            children = ("post_attention_layernorm", "mlp")
            asked[tuple((child, f"{fused_mlps}.{child}") for child in children)] = place(FUSED_MLP)
            self.layers[FUSED_MLP] = FUSED_MLP
            self.places[FUSED_MLP] = place(FUSED_MLP)
        super().__init__(asked, use_local_kernel=self.local)

    def sanitize_kernel_mapping(self, model: Any) -> None:
        model.kernel_config = KernelConfig(
            self.fitting(model), use_local_kernel=self.local, inherit_mapping=False
        )
        model.kernel_config.sanitize_kernel_mapping(model)

    def create_compatible_mapping(self, model: Any, compile: bool = False) -> None:
        own = model.kernel_config
        own.create_compatible_mapping(model, compile)
        # without a mode a layer serves every mode, and survives `model.train()` and `model.eval()`
        own.kernel_mapping = {
            name: {device: next(iter(modes.values())) for device, modes in on.items()}
            for name, on in own.kernel_mapping.items()
        }

    def fitting(self, model: nn.Module) -> dict[str, str]:
        """The layers that can serve every module of their name in this model."""
        found = named_modules(model)
        fit = {}
        for name in (n for n in self.places if n in found):
            others = {type(m).__name__ for m in found[name] if not self._serves(name, m)}
            if others:
                kinds = ", ".join(sorted(others))
                warnings.warn(
                    f"{name} stays as it is: the package has no layer for {kinds}", stacklevel=2
                )
            else:
                fit[name] = self.places[name]
        if not fit:
            has = ", ".join(sorted(found)) or "none"
            raise ValueError(
                f"no layer of the package serves {type(model).__name__}, whose layer names are "
                f"{has}; use kernelwright.hub.kernelize"
            )
        return fit

    def _serves(self, name: str, module: nn.Module) -> bool:
        exact = self.layers[name] == EXACT.get(name)
        return keeps_bits(name, module) if exact else is_served(name, module)


def named_modules(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Modules of a model by layer name, and the functions that transformers wraps as modules."""
    found: dict[str, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for each in (module, *getattr(module, "_kernel_funcs", {}).values()):
            name = getattr(type(each), LAYER_NAME, None)
            if name is not None and each not in found[name]:
                found[name].append(each)
    return found

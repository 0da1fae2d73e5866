"""The Hub package as a KernelConfig of transformers, which asks for layers by their names."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import KernelConfig

from .layer_classes import LAYER_NAME, TRANSFORMERS, is_served


def kernel_config(package: Path, *, rotary: bool = False) -> Any:
    """`mapping` for a model of transformers: `from_pretrained(..., use_kernels=True,
    kernel_config=kernel_config(package))`, or `model.set_use_kernels(True, kernel_config(package))`
    for a model that exists already. transformers takes local kernels on GPUs only.

    It reaches the layers that transformers names: RMSNorm, and the GELUs that are modules. The
    feed-forwards have no names, and SiLU, QuickGELU, RMSNormGated and RMSNormZeroCentered have no
    layer in the package; `kernelize` replaces the feed-forwards too.

    `rotary=True` replaces RoPE as well: for all models of a family in this process, since
    transformers has one function a family.
    """
    names = {**TRANSFORMERS, **({"rotary_pos_emb": "RotaryPosEmb"} if rotary else {})}
    return PackageConfig(package, names)


class PackageConfig(KernelConfig):
    """Layers of a package in a folder, by the names that transformers has for them.

    transformers refuses a config with a name that the model lacks, and modifies the config that it
    is given. So each model gets a config of its own, with the names that the model has.
    """

    def __init__(self, package: Path, names: Mapping[str, str]) -> None:
        place = Path(package).resolve()
        self.places = {name: f"{place}:{layer}" for name, layer in names.items()}
        super().__init__(dict(self.places), use_local_kernel=True)

    def sanitize_kernel_mapping(self, model: Any) -> None:
        model.kernel_config = KernelConfig(self.fitting(model), use_local_kernel=True)
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
            others = {type(m).__name__ for m in found[name] if not is_served(name, m)}
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


def named_modules(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Modules of a model by layer name, and the functions that transformers wraps as modules."""
    found: dict[str, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for each in (module, *getattr(module, "_kernel_funcs", {}).values()):
            name = getattr(type(each), LAYER_NAME, None)
            if name is not None and each not in found[name]:
                found[name].append(each)
    return found

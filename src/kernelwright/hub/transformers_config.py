"""The Hub package as a KernelConfig of transformers, which asks for layers by their names."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import KernelConfig

from .layer_mapping import LAYER_NAME, is_served


class PackageConfig(KernelConfig):
    """Layers of a package in a folder, by the names that transformers has for them.

    transformers refuses a config with names that a model does not have, and changes the one that
    it is given. So each model gets one of its own from this, with the names that it has.
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
        # without a mode they serve all of them, and outlive `model.train()` and `model.eval()`
        own.kernel_mapping = {
            name: {device: next(iter(modes.values())) for device, modes in on.items()}
            for name, on in own.kernel_mapping.items()
        }

    def fitting(self, model: nn.Module) -> dict[str, str]:
        """The layers that serve every module of their name in a model."""
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
    """The modules of a model that have layer names, and the functions that stand as modules."""
    found: dict[str, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for each in (module, *getattr(module, "_kernel_funcs", {}).values()):
            name = getattr(type(each), LAYER_NAME, None)
            if name is not None and each not in found[name]:
                found[name].append(each)
    return found

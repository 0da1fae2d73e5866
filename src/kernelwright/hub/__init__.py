"""Hugging Face Kernels: our ops as a Hub package, its layers, and kernels of the Hub for our ops.

from kernelwright import hub

hub.build(Path("dist"))                       a package that kernels.get_local_kernel loads
hub.check(Path("dist"))                       what the Hub would refuse
hub.kernelize(model, mode=Mode.INFERENCE, package=Path("dist"))
hub.use("kernels-community/activation", version=1)
"""

from __future__ import annotations

from typing import Any

__all__ = ["build", "check", "kernel_config", "kernelize", "mapping", "release", "use"]

_PLACES = {
    "build": "package",
    "check": "rules",
    "kernel_config": "transformers_config",
    "kernelize": "layer_mapping",
    "mapping": "layer_mapping",
    "release": "serving",
    "use": "serving",
}


def __getattr__(name: str) -> Any:
    """Import each on first use, so that `import kernelwright` pays for none of them."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f".{_PLACES[name]}", __name__), name)
    globals()[name] = found
    return found

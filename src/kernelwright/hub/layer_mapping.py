"""The mapping from layer names to layers of the Hub package, and `kernelize` with it.

`kernels.kernelize` knows a class by its attribute `kernel_layer_name`. transformers sets it on its
own classes; those of diffusers and torch have none, so `kernelize` here sets it while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..inject.recipes._recipe import full_name
from .layer_classes import CLASSES, LAYER_NAME, MLPS, TRANSFORMERS, is_served, layer_of
from .package import VERSION

if TYPE_CHECKING:
    from kernels import Mode

REPOSITORY = "kernelwright/ltx-kernels"
# the attribute in which `kernels` looks for a condition on the module
CONDITION = "kernel_condition"
DEVICES = ("cuda", "rocm", "cpu")


def mapping(
    package: Path | None = None,
    *,
    repo_id: str = REPOSITORY,
    version: int = VERSION,
    trust_remote_code: bool | list[str] = False,
) -> dict[str, dict[str, Any]]:
    """The mapping for `kernels.kernelize`: from `package`, a folder that `build` wrote, or from the
    Hub. Every layer serves every mode: all compile without a graph break and have gradients.

    `kernels` loads nothing from a publisher that the Hub does not list as trusted, unless
    `trust_remote_code` is True or a list with `repo_id`.
    """
    require()
    from kernels import LayerRepository, LocalLayerRepository

    def repository(layer: str) -> Any:
        if package is not None:
            return LocalLayerRepository(Path(package).resolve(), layer_name=layer)
        return LayerRepository(
            repo_id, layer_name=layer, version=version, trust_remote_code=trust_remote_code
        )

    served = {**TRANSFORMERS, **{layer: layer for layer in (*MLPS, *CLASSES)}}
    return {
        name: dict.fromkeys(DEVICES, repository(layer)) for name, layer in sorted(served.items())
    }


def kernelize(
    model: nn.Module,
    *,
    mode: Mode,
    package: Path | None = None,
    device: str | None = None,
    **repository: Any,
) -> nn.Module:
    """`kernels.kernelize` with `mapping`, for models of transformers and of diffusers.

    A class keeps its own forward if its code is not the code that its layer was written for.
    """
    require()
    import kernels

    with (
        named(model),
        kernels.use_kernel_mapping(mapping(package, **repository), inherit_mapping=False),
    ):
        return kernels.kernelize(model, mode=mode, device=device, use_fallback=True)


@contextmanager
def named(model: nn.Module) -> Iterator[dict[str, type[nn.Module]]]:
    """Set `kernel_layer_name` on the classes of a model that we have layers for, and remove it
    afterwards. A class that transformers named gets a condition instead: replace only modules that
    our layer serves."""
    from kernels import replace_kernel_forward_from_hub

    given: dict[str, type[nn.Module]] = {}
    held: dict[type[nn.Module], Any] = {}
    for module in model.modules():
        kind, layer = type(module), layer_of(module)
        home = next((c for c in kind.__mro__ if LAYER_NAME in vars(c)), None)
        if home is not None and home not in given.values():
            name = vars(home)[LAYER_NAME]
            if name in TRANSFORMERS and home not in held:
                held[home] = vars(home).get(CONDITION)
                setattr(home, CONDITION, staticmethod(partial(is_served, name)))
        elif layer is not None and home is not kind:
            replace_kernel_forward_from_hub(kind, layer, _only(kind, layer))
            given[full_name(kind)] = kind
    try:
        yield given
    finally:
        for kind in given.values():
            for attribute in (LAYER_NAME, CONDITION):
                delattr(kind, attribute)
        for kind, condition in held.items():
            if condition is None:
                delattr(kind, CONDITION)
            else:
                setattr(kind, CONDITION, condition)


def _only(kind: type[nn.Module], layer: str) -> Callable[[nn.Module], bool]:
    """True for modules of this very class, not of a subclass, that the layer can serve."""
    return lambda module: type(module) is kind and layer_of(module) == layer


def require() -> None:
    if find_spec("kernels") is None:
        raise ImportError("the package `kernels` is not installed: pip install 'kernelwright[hub]'")

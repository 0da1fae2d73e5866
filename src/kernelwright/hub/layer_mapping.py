"""Which layer of the Hub package stands for which class of a model, and `kernelize` with it.

`kernelize` knows a class by the attribute `kernel_layer_name`. transformers names its own; those of
diffusers and torch have none, so `kernelize` here gives them one for as long as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..inject import norms
from ..inject.recipe import full_name, recipes
from ..inject.recipes import llama
from .package import VERSION

if TYPE_CHECKING:
    from kernels import Mode

REPOSITORY = "kernelwright/ltx-kernels"
# what `kernels` keeps on a class
LAYER_NAME, CONDITION = "kernel_layer_name", "kernel_condition"
DEVICES = ("cuda", "rocm", "cpu")
# Layer names of transformers that ours serve. Not its `rotary_pos_emb`, which RotaryPosEmb could
# serve: that is one function for all models of a process.
TRANSFORMERS = ("RMSNorm", "SwiGLUMLP")
# our layers, and the classes they were written after
CLASSES = {
    "DiffusersRMSNorm": "diffusers.models.normalization.RMSNorm",
    "TorchRMSNorm": "torch.nn.modules.normalization.RMSNorm",
    "LayerNorm": "torch.nn.modules.normalization.LayerNorm",
    "AdaLayerNorm": "diffusers.models.normalization.AdaLayerNorm",
    "AdaLayerNormZero": "diffusers.models.normalization.AdaLayerNormZero",
    "AdaLayerNormZeroSingle": "diffusers.models.normalization.AdaLayerNormZeroSingle",
    "AdaLayerNormContinuous": "diffusers.models.normalization.AdaLayerNormContinuous",
    "SD35AdaLayerNormZeroX": "diffusers.models.normalization.SD35AdaLayerNormZeroX",
    "GEGLU": "diffusers.models.activations.GEGLU",
    "SwiGLU": "diffusers.models.activations.SwiGLU",
    "GEGLUMLP": "diffusers.models.attention.FeedForward",
    "LTXVideoTransformerBlock": (
        "diffusers.models.transformers.transformer_ltx.LTXVideoTransformerBlock"
    ),
    "LTXAttention": "diffusers.models.transformers.transformer_ltx.LTXAttention",
}
NORMS = ("DiffusersRMSNorm", "TorchRMSNorm", "LayerNorm")


def mapping(
    package: Path | None = None,
    *,
    repo_id: str = REPOSITORY,
    version: int = VERSION,
    trust_remote_code: bool = False,
) -> dict[str, dict[str, Any]]:
    """The mapping for `kernels.kernelize`: from `package`, a folder that `build` wrote, or from the
    Hub. Every layer serves every mode: all are compiled whole by torch.compile and have gradients.
    """
    require()
    from kernels import LayerRepository, LocalLayerRepository

    def repository(layer: str) -> Any:
        if package is not None:
            return LocalLayerRepository(Path(package).resolve(), layer_name=layer)
        return LayerRepository(
            repo_id, layer_name=layer, version=version, trust_remote_code=trust_remote_code
        )

    layers = sorted((*TRANSFORMERS, *CLASSES))
    return {layer: dict.fromkeys(DEVICES, repository(layer)) for layer in layers}


def kernel_config(package: Path) -> Any:
    """The same for a model of transformers: `from_pretrained(..., use_kernels=True,
    kernel_config=kernel_config(package))`. transformers takes local kernels on GPUs only."""
    from transformers import KernelConfig

    place = Path(package).resolve()
    return KernelConfig({"RMSNorm": f"{place}:RMSNorm"}, use_local_kernel=True)


def kernelize(
    model: nn.Module,
    *,
    mode: Mode,
    package: Path | None = None,
    device: str | None = None,
    **repository: Any,
) -> nn.Module:
    """`kernels.kernelize` with `mapping`, for models of transformers and of diffusers.

    A class whose code is not the one its layer was written after keeps its own forward.
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
    """Give the classes of a model that our layers know their layer names, and take them back. Of
    those that have names already, leave out what is not the norm it is named after."""
    from kernels import replace_kernel_forward_from_hub

    given: dict[str, type[nn.Module]] = {}
    held: dict[type[nn.Module], Any] = {}
    for module in model.modules():
        kind, layer = type(module), layer_of(module)
        home = next((c for c in kind.__mro__ if LAYER_NAME in vars(c)), None)
        if home is not None and home not in given.values():
            if vars(home)[LAYER_NAME] == "RMSNorm" and home not in held:
                held[home] = vars(home).get(CONDITION)
                setattr(home, CONDITION, staticmethod(_is_llama_norm))
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


def layer_of(module: nn.Module) -> str | None:
    """The layer that may stand for a module, or None."""
    kind = type(module)
    name = next((layer for layer, known in CLASSES.items() if known == full_name(kind)), None)
    if name is None:
        return "SwiGLUMLP" if llama.is_mlp(module) is True else None
    if name in NORMS:
        return name if isinstance(norms.describe(module), norms.Norm) else None
    for recipe in recipes():
        for patch in recipe.patches:
            if patch.sources and patch.matches(module) is True:
                return name if patch.is_written_for(kind) else None
    return name


def _is_llama_norm(module: nn.Module) -> bool:
    """A norm as the layer RMSNorm reads it; Gemma's `1 + weight` is not."""
    found = norms.describe(module)
    return isinstance(found, norms.Norm) and (found.kind, found.eps) == ("rms", "variance_epsilon")


def _only(kind: type[nn.Module], layer: str) -> Callable[[nn.Module], bool]:
    """This class and no other that inherits from it, and no module that the layer cannot serve."""
    return lambda module: type(module) is kind and layer_of(module) == layer


def require() -> None:
    if find_spec("kernels") is None:
        raise ImportError("the package `kernels` is not installed: pip install 'kernelwright[hub]'")

"""Which layer of the Hub package stands for which class of a model, and `kernelize` with it.

`kernelize` knows a class by the attribute `kernel_layer_name`. transformers names its own; those of
diffusers and torch have none, so `kernelize` here gives them one for as long as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..inject.identify import norm_kinds
from ..inject.identify.source import fingerprint
from ..inject.recipes import llama
from ..inject.recipes._recipe import full_name, recipes
from .layers.gated import gelu_form
from .layers.rotary import turned
from .package import VERSION

if TYPE_CHECKING:
    from kernels import Mode

REPOSITORY = "kernelwright/ltx-kernels"
# what `kernels` keeps on a class
LAYER_NAME, CONDITION = "kernel_layer_name", "kernel_condition"
DEVICES = ("cuda", "rocm", "cpu")
# Layer names of transformers, and our layers that serve them. Not its `rotary_pos_emb`, which
# RotaryPosEmb could serve: that is one function for all models of a process.
TRANSFORMERS = {
    "RMSNorm": "RMSNorm",
    "GeLU": "GeLU",
    "GeluTanh": "GeluTanh",
    "NewGELU": "GeluTanh",
    "FastGELU": "GeluTanh",
}
# its feed-forwards have no names; a copy of the code of LlamaMLP is known by that
MLPS = ("SwiGLUMLP", "GemmaMLP")
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

    served = {**TRANSFORMERS, **{layer: layer for layer in (*MLPS, *CLASSES)}}
    return {
        name: dict.fromkeys(DEVICES, repository(layer)) for name, layer in sorted(served.items())
    }


def kernel_config(package: Path, *, rotary: bool = False) -> Any:
    """The same for a model of transformers: `from_pretrained(..., use_kernels=True,
    kernel_config=kernel_config(package))`, or `model.set_use_kernels(True, kernel_config(package))`
    on a model that is there. transformers takes local kernels on GPUs only.

    It knows layers by the names that transformers gives, so it reaches RMSNorm and the GELUs that
    are modules, of those what the model has. transformers names no feed-forward, and its SiLU,
    QuickGELU, RMSNormGated and RMSNormZeroCentered have no layer here: `kernelize` does the MLPs.

    `rotary=True` takes RoPE as well. transformers has one function a family for it, so all models
    of that family in the process then run it.
    """
    from .transformers_config import PackageConfig

    names = {**TRANSFORMERS, **({"rotary_pos_emb": "RotaryPosEmb"} if rotary else {})}
    return PackageConfig(package, names)


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
    those that have names already, leave out what is not the layer it is named after."""
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


def layer_of(module: nn.Module) -> str | None:
    """The layer that may stand for a module, or None."""
    kind = type(module)
    name = next((layer for layer, known in CLASSES.items() if known == full_name(kind)), None)
    if name is None:
        return _mlp_of(module)
    if name in NORMS:
        return name if isinstance(norm_kinds.describe(module), norm_kinds.Norm) else None
    for recipe in recipes():
        for patch in recipe.patches:
            if patch.sources and patch.matches(module) is True:
                return name if patch.is_written_for(kind) else None
    return name


def _mlp_of(module: nn.Module) -> str | None:
    if llama.is_mlp(module) is True:
        return "SwiGLUMLP"
    is_gelu = gelu_form(getattr(module, "act_fn", None)) is not None
    return "GemmaMLP" if is_gelu and fingerprint(type(module).forward) == llama.MLP else None


def is_served(name: str, module: nn.Module) -> bool:
    """Whether a module with this name from transformers does what our layer for it does: Gemma's
    `1 + weight` is not RMSNorm."""
    if name == "RMSNorm":
        norm = norm_kinds.describe(module)
        return isinstance(norm, norm_kinds.Norm) and (norm.kind, norm.eps) == (
            "rms",
            "variance_epsilon",
        )
    if name == "rotary_pos_emb":
        return turns_as_llama(module)
    return gelu_form(module) == ("none" if name == "GeLU" else "tanh")


def turns_as_llama(function: nn.Module) -> bool:
    """Whether a family's RoPE is that of Llama, found by trying it: some pair neighbours, turn the
    other way, or keep the dtype of the rows where tables are wider."""
    generator = torch.Generator().manual_seed(0)
    query, key, angle = (
        torch.randn(shape, generator=generator, device="cpu")
        for shape in ((1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 4))
    )
    tables = angle.repeat(1, 1, 2).cos(), angle.repeat(1, 1, 2).sin()
    for dtype in (torch.float32, torch.bfloat16):
        rows = query.to(dtype), key.to(dtype)
        try:
            query_turned, key_turned = type(function).forward(function, *rows, *tables)
        except Exception:  # one that takes other arguments is none of ours, whatever it raised
            return False
        wanted = [turned(x, *(t[:, None] for t in tables)) for x in rows]
        for got, want in zip((query_turned, key_turned), wanted, strict=True):
            if got.dtype != want.dtype or not torch.equal(got, want):
                return False
    return True


def _only(kind: type[nn.Module], layer: str) -> Callable[[nn.Module], bool]:
    """This class and no other that inherits from it, and no module that the layer cannot serve."""
    return lambda module: type(module) is kind and layer_of(module) == layer


def require() -> None:
    if find_spec("kernels") is None:
        raise ImportError("the package `kernels` is not installed: pip install 'kernelwright[hub]'")

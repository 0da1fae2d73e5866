"""Which layer of the Hub package replaces the forward of which module."""

from __future__ import annotations

import torch
from torch import nn

from ..inject.identify import norm_kinds
from ..inject.identify.source import fingerprint
from ..inject.recipes import llama
from ..inject.recipes._recipe import full_name, recipes
from .layers.exact import is_torch_gelu
from .layers.gated import gelu_form
from .layers.rotary import turned

# the attribute by which `kernels` knows a class
LAYER_NAME = "kernel_layer_name"
# Layer names of transformers, and our layers for them. `rotary_pos_emb` is left out, although
# RotaryPosEmb could serve it: transformers has one such function for all models of a process.
TRANSFORMERS = {
    "RMSNorm": "RMSNorm",
    "GeLU": "GeLU",
    "GeluTanh": "GeluTanh",
    "NewGELU": "GeluTanh",
    "FastGELU": "GeluTanh",
}
# the same names, and the layers that keep the bits of eager
EXACT = {"RMSNorm": "ExactRMSNorm", "GeLU": "ExactGeLU", "GeluTanh": "ExactGeluTanh"}
# a norm and the feed-forward after it, which transformers fuses into one module on request
FUSED_MLP = "RMSNormSwiGLUMLP"
# transformers gives its feed-forwards no layer names: they are recognised by LlamaMLP's code
MLPS = ("SwiGLUMLP", "GemmaMLP")
# our layers, and the class that each replaces
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
    "FluxTransformerBlock": "diffusers.models.transformers.transformer_flux.FluxTransformerBlock",
    "FluxSingleTransformerBlock": (
        "diffusers.models.transformers.transformer_flux.FluxSingleTransformerBlock"
    ),
    "FluxAttention": "diffusers.models.transformers.transformer_flux.FluxAttention",
}
NORMS = ("DiffusersRMSNorm", "TorchRMSNorm", "LayerNorm")


def layer_of(module: nn.Module) -> str | None:
    """The layer that can replace a module's forward, or None."""
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
    """Whether our layer computes what this module, named so by transformers, computes: Gemma's norm
    is named RMSNorm too, but multiplies by `1 + weight`."""
    if name == FUSED_MLP:
        return True
    if name == "RMSNorm":
        norm = norm_kinds.describe(module)
        return isinstance(norm, norm_kinds.Norm) and (norm.kind, norm.eps) == (
            "rms",
            "variance_epsilon",
        )
    if name == "rotary_pos_emb":
        return turns_as_llama(module)
    return gelu_form(module) == ("none" if name == "GeLU" else "tanh")


def keeps_bits(name: str, module: nn.Module) -> bool:
    """Whether our exact layer has the bits of this module, named so by transformers."""
    if not is_served(name, module):
        return False
    if name == "RMSNorm":
        norm = norm_kinds.describe(module)
        return isinstance(norm, norm_kinds.Norm) and norm.chain == "transformers"
    return is_torch_gelu(module, name == "GeluTanh")


def turns_as_llama(function: nn.Module) -> bool:
    """Whether a family's RoPE gives Llama's bits on a small input: some families pair neighbouring
    elements, rotate the other way, or keep the dtype of the rows where the tables are wider."""
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
        except Exception:  # it takes other arguments, so it is not Llama's
            return False
        wanted = [turned(x, *(t[:, None] for t in tables)) for x in rows]
        for got, want in zip((query_turned, key_turned), wanted, strict=True):
            if got.dtype != want.dtype or not torch.equal(got, want):
                return False
    return True

"""What can be injected: a pipeline, a model, or any module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

# components of a pipeline that run at every step; the others run once per picture
DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder", "controlnet")


@dataclass(frozen=True)
class Part:
    """A model, and its name in its pipeline ("" without one)."""

    name: str
    model: nn.Module

    @property
    def denoises(self) -> bool:
        return not self.name or self.name in DENOISERS

    @property
    def encodes(self) -> bool:
        """Whether it is a model of transformers, such as a text encoder.

        These are worth a graph although they run only once or twice per picture: T5-XXL takes 37 ms
        for a prompt, of which an H200 is busy for 7. Its capture costs about three such calls,
        once: little beside first sight in the first picture, and recovered by the third. A VAE is
        not: its kernels are long, and a graph would keep all its activations in memory.
        """
        return type(self.model).__module__.partition(".")[0] == "transformers"

    @property
    def graphed(self) -> nn.Module:
        """The module that is replayed as a graph: the model, or the body of a language model. Its
        logits would be copied out of the graph, a gigabyte for 4096 tokens of Llama-3-8B."""
        head = getattr(self.model, "get_output_embeddings", None)
        body = getattr(self.model, "base_model", None)
        if self.encodes and isinstance(body, nn.Module) and head is not None and head() is not None:
            return body
        return self.model

    def path(self, module: str) -> str:
        return ".".join(p for p in (self.name, module) if p) or type(self.model).__name__


def parts_of(target: Any) -> list[Part]:
    """The models of a target, without the wrapper of torch.compile."""
    if isinstance(target, nn.Module):
        return [Part("", _unwrapped(target))]
    components = getattr(target, "components", None)
    if isinstance(components, dict):
        models = {n: c for n, c in components.items() if isinstance(c, nn.Module)}
        if models:
            return [Part(name, _unwrapped(model)) for name, model in models.items()]
        raise ValueError(f"{type(target).__name__} has no model among its components")
    raise TypeError(
        f"target is a {type(target).__name__}; expected a diffusers pipeline, a model of diffusers "
        f"or transformers, or another torch.nn.Module"
    )


def _unwrapped(model: nn.Module) -> nn.Module:
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner

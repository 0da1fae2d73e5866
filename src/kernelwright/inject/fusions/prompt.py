"""What depends on the text alone, and so is the same at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..identify import norm_kinds
from ..reuse.compiled_prompt_values import OF_TEXT
from ..runtime.forwards import hooked
from ..state.hooks import is_plain
from .projections import ProjectionPlaces


class TextPlaces(ProjectionPlaces):
    def of_prompt(
        self, owner: Any, text: Tensor, layers: Sequence[Any], make: Callable[[], Any]
    ) -> Any:
        """`make()`, which depends on the text and the weights of these layers alone: once a prompt,
        as long as nothing wants to see the layers being called."""
        if torch.compiler.is_compiling() or any(map(hooked, layers)):
            return make()
        if not all(is_plain(m, nn.Linear) or norm_kinds.key(m) in self.norms for m in layers):
            return make()
        if self.fp8_layers is not None:
            for layer in layers:
                self.fp8_layers.leave(layer, "made once a prompt")
        return self.prompts.once(owner, text, layers, make)

    def text_products(self, text: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...]:
        """layer(text) of each layer; in a graph of torch.compile one op, which keeps them."""
        if not torch.compiler.is_compiling() or not self._may_trace(text, layers):
            return tuple([layer(text) for layer in layers])
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return OF_TEXT(text, weights, biases).split_with_sizes([len(w) for w in weights], -1)

"""Values that depend on the prompt alone, and so are the same at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..identify import norm_kinds
from ..identify.norm_kinds import Norm
from ..reuse.compiled_prompt_values import TEXT_PROJECTIONS
from ..runtime.forwards import hooked
from ..state.hooks import is_plain
from .projections import ProjectionFusions


class PromptFusions(ProjectionFusions):
    def once_per_prompt(
        self, owner: Any, text: Tensor, layers: Sequence[Any], make: Callable[[], Any]
    ) -> Any:
        """`make()`, which depends on the text and the weights of these layers alone; cached unless
        a hook is on one of them."""
        if torch.compiler.is_compiling() or any(map(hooked, layers)):
            return make()
        if not all(is_plain(m, nn.Linear) or self._is_norm(m) for m in layers):
            return make()
        if self.fp8_layers is not None:
            for layer in layers:
                self.fp8_layers.leave(layer, "runs once per prompt")
        weights = [p for layer in layers for p in layer._parameters.values() if p is not None]
        return self.prompts.once(owner, text, weights, make)

    def is_of_prompt(self, x: Tensor) -> bool:
        """Whether a tensor was computed once per prompt, so that what is made of it can be too."""
        return not torch.compiler.is_compiling() and self.prompts.have_made(x)

    def _is_norm(self, module: nn.Module) -> bool:
        known = self._norm_of_module.get(module)
        if isinstance(known, Norm):
            return True
        # `key` reads a weight, which of a parametrized layer is computed every time
        return norm_kinds.looks_like_norm(module) and norm_kinds.key(module) in self.norms

    def text_projections(self, text: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...]:
        """layer(text) of each layer; under torch.compile one op, which caches them."""
        if not torch.compiler.is_compiling() or not self._may_trace_projections(text, layers):
            return tuple([layer(text) for layer in layers])
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return TEXT_PROJECTIONS(text, weights, biases).split_with_sizes(
            [len(w) for w in weights], -1
        )

"""What recorded blocks make of a prompt: computed once, as in recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...fuser.running import PromptSteps
from ..graphs import prompt_graph
from .program_products import running
from .prompt_values import Prompts, storage_ref


@dataclass(eq=False)
class KeptPrompt:
    """What one module makes of its prompt: kept from the second call with the same one on."""

    steps: PromptSteps
    prompts: Prompts
    owner: nn.Module
    layers: Mapping[str, nn.Module]
    last: Any = None  # a weak reference to the memory of the prompt of the last call

    def __call__(self, inputs: Sequence[Tensor]) -> list[Any]:
        source, weights = inputs[self.steps.source], [inputs[i] for i in self.steps.weights]
        count = len(inputs)  # no other input must be kept alive

        def make() -> list[Any]:
            own: list[Any] = [None] * count
            own[self.steps.source] = source
            for place, weight in zip(self.steps.weights, weights, strict=True):
                own[place] = weight
            before, running.layers = running.layers, self.layers
            try:
                return self.steps.make(own)
            finally:
                running.layers = before

        again = self.last is not None and self.last() is prompt_graph.root(source).untyped_storage()
        if not again and prompt_graph.active() is None:
            self.last = storage_ref(prompt_graph.root(source))
            return make()
        return self.prompts.once(self.owner, source, weights, make, self.steps)

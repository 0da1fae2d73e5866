"""Projections of the prompt as an op for torch.compile, computed once per prompt.

A compiled graph may overwrite what an op returns, so it gets a copy, which costs little beside the
GEMMs. A value is cached from the second call with the same text on: where the whole model is
compiled, each step has a new text tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...ops import library
from ..graphs import prompt_graph
from ..graphs.prompt_graph import root
from ..runtime import model_run
from . import packed_gemm, packed_weights
from .prompt_values import MadeFrom, can_cache, layout_and_version


class _Entry:
    """A text, and from its second call on its projections, which are freed with it."""

    def __init__(self, operands: Sequence[Tensor], facts: Hashable) -> None:
        me = ref(self)
        self.source = ref(operands[0], lambda _: _forget(me))
        self.made = MadeFrom.of(operands, facts)
        self.value: Tensor | None = None


def _forget(entry: ref[_Entry]) -> None:
    if (found := entry()) is not None:
        found.value = None


_by_weight: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _text_projections(text: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """text @ w.T + b of all layers, concatenated: [..., sum of outputs]."""
    owner: Any = weights[0].untyped_storage()

    def make() -> Tensor:
        return torch.cat(packed_gemm.separate_linears(text, weights, biases), -1)

    with torch.no_grad():
        if not can_cache(text, [*weights, *biases]):
            return make()
        running = prompt_graph.active()
        if running is not None:
            return running.once(owner, text, [*weights, *biases], make).clone()
        samples = model_run.active.samples
        if (
            samples is None
            or not model_run.checks_samples()
            or packed_weights.why_not_now(text.device)
        ):
            return make()
        operands = root(text), *weights, *biases
        facts = layout_and_version(text), model_run.active.switches, id(samples), samples.epoch
        entry = _by_weight.get(owner)
        if entry is None or not entry.made.holds(operands, facts):
            _by_weight[owner] = _Entry(operands, facts)
            return make()
        if entry.value is None:
            for operand in operands:
                samples.note(operand, whole=operand is operands[0])
            entry.value = make()
        return entry.value.clone()


def _empty_output(text: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return text.new_empty((*text.shape[:-1], sum(len(w) for w in weights)))


TEXT_PROJECTIONS = library.define_unrecorded(
    "products_of_text",
    "(Tensor text, Tensor[] weights, Tensor[] biases) -> Tensor",
    _text_projections,
    _empty_output,
)

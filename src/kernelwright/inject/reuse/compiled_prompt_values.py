"""Products of the text for a graph of torch.compile, made once a prompt.

The graph takes what an op returns for its own and may write over it, so it is given a copy; that
is a small part of the work. A text is kept from its second step on: where the whole model is
compiled, each step has a text of its own.
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
from .prompt_values import Made, can_be_kept, layout


class _Entry:
    """A text that was seen, and what was made of it; let go when the text is."""

    def __init__(self, operands: Sequence[Tensor], facts: Hashable) -> None:
        mine = ref(self)
        self.source = ref(operands[0], lambda _: _forget(mine))
        self.made = Made.of(operands, facts)
        self.value: Tensor | None = None


def _forget(entry: ref[_Entry]) -> None:
    if (found := entry()) is not None:
        found.value = None


_by_weight: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _of_text(text: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """The products of all weights beside each other: [..., sum of outputs]."""
    owner: Any = weights[0].untyped_storage()

    def make() -> Tensor:
        return torch.cat(packed_gemm.apart(text, weights, biases), -1)

    with torch.no_grad():
        if not can_be_kept(text, [*weights, *biases]):
            return make()
        running = prompt_graph.current()
        if running is not None:
            return running.once(owner, text, [*weights, *biases], make).clone()
        contents = model_run.current.contents
        if contents is None or not model_run.looks_back() or packed_weights.not_now(text.device):
            return make()
        operands = root(text), *weights, *biases
        facts = layout(text), model_run.current.switches, id(contents), contents.epoch
        entry = _by_weight.get(owner)
        if entry is None or not entry.made.holds(operands, facts):
            _by_weight[owner] = _Entry(operands, facts)
            return make()
        if entry.value is None:
            for operand in operands:
                contents.note(operand, whole=operand is operands[0])
            entry.value = make()
        return entry.value.clone()


def _room(text: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return text.new_empty((*text.shape[:-1], sum(len(w) for w in weights)))


OF_TEXT = library.define_unrecorded(
    "products_of_text",
    "(Tensor text, Tensor[] weights, Tensor[] biases) -> Tensor",
    _of_text,
    _room,
)

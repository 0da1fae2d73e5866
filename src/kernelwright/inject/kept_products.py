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

from ..ops import library
from . import adapters, packing, products
from .graphs import prelude
from .graphs.prelude import root
from .prompts import can_be_kept, layout


class _Entry:
    """A text that was seen, and what was made of it; let go when the text is."""

    def __init__(self, text: Tensor, facts: Hashable) -> None:
        mine = ref(self)
        self.source = ref(root(text), lambda _: _forget(mine))
        self.facts = facts
        self.value: Tensor | None = None

    def is_of(self, text: Tensor, facts: Hashable) -> bool:
        return self.source() is root(text) and self.facts == facts


def _forget(entry: ref[_Entry]) -> None:
    if (found := entry()) is not None:
        found.value = None


_by_weight: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _of_text(text: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """The products of all weights beside each other: [..., sum of outputs]."""
    operands = [*weights, *biases]
    owner: Any = weights[0]

    def make() -> Tensor:
        return torch.cat(products.apart(text, weights, biases), -1)

    with torch.no_grad():
        if not can_be_kept(text, operands):
            return make()
        adapters.listen()
        running = prelude.current()
        if running is not None:
            return running.once(owner, text, operands, make).clone()
        if packing.not_now(text.device):
            return make()
        places = tuple((w.data_ptr(), w._version) for w in operands)
        facts = layout(text), places, adapters.all_moves()
        entry = _by_weight.get(owner)
        if entry is None or not entry.is_of(text, facts):
            _by_weight[owner] = _Entry(text, facts)
            return make()
        if entry.value is None:
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

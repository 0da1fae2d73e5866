"""The blocks of a model, which are what is recorded, and what a forward of the model gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..library_internals import peft_layers

# a module in a list is a block if it has more parts than this; a layer of a feed-forward has fewer
PARTS = 5


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that a model repeats: those in lists, the innermost where lists are nested."""
    modules = list(model.modules())
    adapters = {m for layer in peft_layers(modules) for m in layer.modules()}
    found = [
        block
        for module in modules
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for block in module.children()
        if block not in adapters and len(set(block.modules()) - adapters) > PARTS
    ]
    inner = set(found)
    return [
        block
        for block in dict.fromkeys(found)
        if not any(m in inner for m in block.modules() if m is not block)
    ]


class BlockCall(NamedTuple):
    module: nn.Module
    args: Any
    kwargs: Any
    result: Any


def block_calls(
    model: nn.Module, inputs: Mapping[str, Any]
) -> dict[str, tuple[nn.Module, Any, Any]]:
    """Run the model once; the first block of each class by its name, with args and kwargs."""
    return {kind: calls[0][:3] for kind, calls in calls_in_a_row(model, inputs).items()}


def calls_in_a_row(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, list[BlockCall]]:
    """Run the model once; the first block of each class by its name, and the one after it if that
    is of the same class."""
    found: dict[str, list[BlockCall]] = {}
    before = ""

    def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        nonlocal before
        kind = type(module).__name__
        calls = found.setdefault(kind, [])
        if not calls or (len(calls) == 1 and kind == before):
            calls.append(BlockCall(module, args, kwargs, result))
        before = kind

    hooks = [b.register_forward_hook(note, with_kwargs=True) for b in blocks(model)]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found

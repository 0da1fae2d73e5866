"""One block of each class of a model, and what a forward of the model gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# a module in a list of its own is a block if it has more parts than this
PARTS = 5


def block_calls(
    model: nn.Module, inputs: Mapping[str, Any]
) -> dict[str, tuple[nn.Module, Any, Any]]:
    """Run the model once; the first block of each class by its name, with args and kwargs."""
    found: dict[str, tuple[nn.Module, Any, Any]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.setdefault(type(module).__name__, (module, args, kwargs))

    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    blocks = [b for m in lists for b in m if len(list(b.modules())) > PARTS]
    hooks = [b.register_forward_pre_hook(note, with_kwargs=True) for b in blocks]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found

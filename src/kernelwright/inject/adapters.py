"""Whether an adapter has been put around a layer, or taken off it.

peft wraps a layer, may add to its weight behind the back of PyTorch's version counter, and unwraps
it again. What was made from such a weight must then be made anew. A layer is wrapped by being
registered in another module, and PyTorch tells who asks of every registration.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

_moves: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_wrapped: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_listening: list[Any] = []
_all = [0]


def watch(layer: nn.Module) -> None:
    """Notice from now on what happens to a layer."""
    listen()
    _moves.setdefault(layer, 0)


def moves(layer: nn.Module) -> int:
    """How often a watched layer was put into another module."""
    return _moves.get(layer, 0)


def all_moves() -> int:
    """The same of all watched layers together, and how often any layer was wrapped."""
    return _all[0]


def is_wrapped(layer: nn.Module) -> bool:
    """Whether an adapter has come around a watched layer."""
    return _wrapped.get(layer, False)


def listen() -> None:
    """Notice from now on whether any layer is wrapped."""
    if not _listening:
        _listening.append(register_module_module_registration_hook(_registered))


def _registered(parent: nn.Module, name: str, child: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a module that a graph makes for itself; Dynamo would guard every watched layer
    watched = child is not None and child in _moves
    if watched:
        _moves[child] += 1
        _wrapped[child] = name == "base_layer"
    if watched or name == "base_layer":
        _all[0] += 1

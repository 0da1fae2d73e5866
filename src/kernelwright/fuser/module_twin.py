"""A module of the same code and tensors that can be recorded while others run the original."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from copy import copy as copied
from types import MethodType
from typing import Any

from torch import nn

CONTAINERS = (list, dict, set)
OWN = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def twin_of(root: nn.Module, shared: Sequence[nn.Module] = ()) -> nn.Module:
    """A copy of a tree of modules that shares their tensors and other attributes. Lists, dicts and
    sets are copied, their items are not.

    Weights of the twin can be exchanged, attributes set and lists filled without a change to the
    original. `shared` modules are not copied. Calling the twin runs the forward of its class: hooks
    of the root and another forward set on it are around that, and run whoever calls the root.
    """
    made: dict[int, nn.Module] = {id(m): m for m in shared}
    containers: dict[int, Any] = {}  # modules that share one share its copy

    def twin(module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        copy = made[id(module)] = object.__new__(type(module))
        own = dict(vars(module))
        for name, value in own.items():
            if type(value) in CONTAINERS:
                own[name] = containers.setdefault(id(value), copied(value))
        own |= {name: dict(own[name]) for name in OWN}
        vars(copy).update(own)
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else twin(child)
        return copy

    found = twin(root)
    for copy in list(made.values()):
        for name, value in list(vars(copy).items()):
            # a forward that was set on the module itself is a method of it
            if isinstance(value, MethodType) and id(value.__self__) in made:
                vars(copy)[name] = MethodType(value.__func__, made[id(value.__self__)])
    vars(found).pop("forward", None)
    vars(found).update({name: OrderedDict() for name in HOOKS})
    return found

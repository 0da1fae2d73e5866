"""The forward of a module while it is recorded, checked for what it does beside computing tensors.

A counter, a cache or a buffer that a forward sets on its modules, or in a list that it is given,
would be set once, by the recording, and never again: a replayed graph runs no Python. Nor could an
object that it returns be made anew.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..backends.torch_internals import pytree
from .module_twin import CONTAINERS, HOOKS, OWN

SETS = "sets what it is given"
PLAIN = (Tensor, bool, int, float, str, type(None))


class CannotRecord(Exception):
    """Why a forward cannot be written down."""


class WatchedForward(nn.Module):
    """Calls the forward of a module, and raises CannotRecord if it has set an attribute or an item
    of what it was given, or returns objects.

    The forward is called rather than the module, whose class may do more: transformers' layers run
    checkpointing there, which is around what is recorded.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = {m: _held(m) for m in self.module.modules()}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        result = self.module.forward(*args, **kwargs)
        after = pytree.tree_flatten((args, kwargs))
        if after[1] != structure or list(map(id, after[0])) != list(map(id, leaves)):
            raise CannotRecord(f"the forward of {type(self.module).__name__} {SETS}")
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, PLAIN):
                raise CannotRecord(f"it returns a {type(leaf).__name__}")
        for module, held in before.items():
            if (name := _changed(held, _held(module))) is not None:
                raise CannotRecord(f"the forward of {type(module).__name__} sets {name}")
        return result


def _held(module: nn.Module) -> dict[str, list[Any]]:
    """What a module holds under each name: the objects, and the items of containers."""
    own = {n: v for n, v in vars(module).items() if n not in (*OWN, *HOOKS)}
    tensors = {**module._parameters, **module._buffers}
    return {name: [value, *_items(value)] for name, value in (*own.items(), *tensors.items())}


def _items(value: Any) -> list[Any]:
    if type(value) not in CONTAINERS:
        return []
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _changed(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> str | None:
    """The first name whose objects are not the same as before."""
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old is None or new is None or list(map(id, old)) != list(map(id, new)):
            return name
    return None

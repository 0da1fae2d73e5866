"""Which modules do the same with their weights: one recording serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ...library_internals import HOOK_ATTRIBUTES
from ..state.hooks import COMMON, has_settings
from ..state.module_state import is_plain_value

# numbers that tell layers apart and that only a key-value cache reads
POSITION = frozenset(("layer_idx",))


def structure_of(root: nn.Module, opaque: Collection[nn.Module] = ()) -> Any:
    """A key that two modules share only if the code of their forwards reads the same values, apart
    from weights. `opaque` layers are called, not read."""
    inside = {id(m) for layer in opaque for m in layer.modules()}
    found: list[tuple[Any, ...]] = []
    for name, module in root.named_modules():
        if id(module) in inside:
            found.append((name, "opaque" if module in opaque else ""))
            continue
        own = [
            (key, _described(value, name)) for key, value in vars(module).items() if _counts(key)
        ]
        found.append((name, type(module), module.training, tuple(own), _weights(module)))
    return tuple(found)


def _counts(name: str) -> bool:
    return name not in COMMON and name not in POSITION and name not in HOOK_ATTRIBUTES


def _described(value: Any, name: str) -> Any:
    """What has to be the same in a module of this name: values where they compare, else the very
    object. The module's own name in the whole model tells layers apart, as an index does: peft
    keeps it in the layers it puts adapters around."""
    if isinstance(value, Tensor):
        return _Same(value)
    if isinstance(value, list | tuple):
        return type(value), tuple([_described(v, name) for v in value])
    if isinstance(value, dict):
        return dict, tuple((k, _described(v, name)) for k, v in value.items())
    if isinstance(value, str) and name and value.endswith(f".{name}"):
        return str, name
    if is_plain_value(value):
        return type(value), value
    if has_settings(value) and not hasattr(value, "to_dict"):  # a processor, not a config
        names = sorted(vars(value))
        return type(value), tuple((n, _plain_or_same(vars(value)[n])) for n in names)
    return _Same(value)


def _plain_or_same(value: Any) -> Any:
    return value if is_plain_value(value) else _Same(value)


class _Same:
    """Equal to what holds the very same object. An id alone would be equal to that of another
    object that takes the place of a freed one."""

    __slots__ = ("_hash", "_held")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._held: Callable[[], Any] = ref(value)
        except TypeError:  # an object with slots
            self._held = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        held = self._held()
        return isinstance(other, _Same) and held is not None and held is other._held()


def _weights(module: nn.Module) -> tuple[Any, ...]:
    held = (*module._parameters.items(), *module._buffers.items())
    return tuple((name, layout(t)) for name, t in held)


def layout(t: Tensor | None) -> Any:
    """How a tensor lies in memory, without where."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device)

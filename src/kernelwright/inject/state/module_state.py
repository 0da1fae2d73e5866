"""What a kept result depends on beside its inputs: modules as they were.

Verdicts of first sight, text keys and values, rotary tables, descriptions of norms, fp8 weights and
captured graphs are all made by running some modules once. `State` writes down what such a run reads
from Python: classes and their functions, attributes, children, hooks, processors and configs.
`State.holds` answers whether all of that is unchanged. Values written into weights are no part of
it: kernels read weights where they lie, and what is computed from them is kept by `contents`.

`holds` runs before every forward, so it walks flat lists that were laid out once and leaves the
loops to builtins: about 0.4 us a module. Nothing here holds on to the module it describes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from itertools import chain
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

COMMON = frozenset(vars(nn.Module()))  # what every module has
FORWARDS = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, type, slice),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
)
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
CONTAINERS = (list, dict, set)
NO_SETTINGS = (nn.Module, Tensor, type, *FUNCTIONS)
# libraries whose modules compute and remember nothing, unless an argument or a hook does
LIBRARIES = frozenset(("torch", "diffusers", "transformers", "peft", "accelerate", "kernelwright"))
MARK = "__kernelwright__"  # the attribute by which a forward of ours is known


class State:
    """A module and everything inside it, as it was when this was made.

    `adapters`: whether what peft's layers read counts too (scales, active adapters). Nothing is
    fused around such a layer, so for a verdict it does not; for a graph it does.
    """

    def __init__(self, root: nn.Module, adapters: bool = True) -> None:
        modules = [m for m in root.modules() if isinstance(m._modules, dict)]
        opaque = set() if adapters else set(_inside_adapters(modules))
        inner = [m for m in modules if m is not root]
        children = [m._modules for m in modules]
        weights = [d for m in modules if m not in opaque for d in (m._parameters, m._buffers)]
        hooks = [d for m in inner for d in hooks_of(m)]
        self._root_type = type(root)
        self._inner = inner
        self._types = list(map(type, inner))
        self._empty = [d for d in (*children, *weights, *hooks) if not d]
        self._hooked = [d for d in hooks if d]
        self._hook_ids = list(map(tuple, self._hooked))
        self._branches = [d for d in children if d]
        self._children = _values(self._branches)
        self._holders = [d for d in weights if d]
        self._kinds = _kinds(self._holders)
        self._root = _Attributes(vars(root))
        self._names = [vars(m) for m in inner]
        described = [_Attributes(vars(m), only=FORWARDS if m in opaque else None) for m in inner]
        self._sizes = [a.size for a in described]
        self._plain = [(n, a.get) for n, a in zip(self._names, described, strict=True)]
        self._plain_values = [a.values for a in described]
        self._other = [
            (names, name, found)
            for names, a in zip(self._names, described, strict=True)
            for name, found in a.other
        ]
        settings = {id(o): o for a in (self._root, *described) for o in a.objects}.values()
        self._settings = [_Settings(vars(o)) for o in settings]
        classes = dict.fromkeys((type(root), *self._types, *map(type, settings)))
        self._codes = [code_of(kind) for kind in classes]

    def holds(self, root: nn.Module) -> bool:
        """Whether nothing has changed that a forward of `root` reads from Python."""
        try:
            return (
                type(root) is self._root_type
                and not any(self._empty)
                and list(map(tuple, self._hooked)) == self._hook_ids
                and list(map(len, self._names)) == self._sizes
                and [get(names) for names, get in self._plain] == self._plain_values
                and _same(_values(self._branches), self._children)
                and list(map(type, self._inner)) == self._types
                and _kinds(self._holders) == self._kinds
                and self._root.hold(vars(root))
                and all(found.is_in(names, name) for names, name, found in self._other)
                and all(settings.hold() for settings in self._settings)
                and all(code.holds() for code in self._codes)
            )
        except (KeyError, RuntimeError, ValueError, TypeError):
            return False  # an attribute is gone, or is now something that cannot be compared

    def settle(self, root: nn.Module) -> bool:
        """Whether attributes were written since this was made; they do not count from here on.
        A forward that writes to its own module has a memory, and may write every time."""
        rows = zip(self._names, self._sizes, self._plain, self._plain_values, strict=True)
        kept = [row for row in rows if len(row[0]) == row[1] and row[2][1](row[0]) == row[3]]
        other = [row for row in self._other if row[2].is_in(row[0], row[1])]
        settings = [found for found in self._settings if found.hold()]
        written = (
            len(kept) < len(self._names)
            or len(other) < len(self._other)
            or len(settings) < len(self._settings)
        )
        self._names = [row[0] for row in kept]
        self._sizes = [row[1] for row in kept]
        self._plain = [row[2] for row in kept]
        self._plain_values = [row[3] for row in kept]
        self._other, self._settings = other, settings
        return not self._root.settle(vars(root)) or written


class _Attributes:
    """The attributes of one module: plain values, which are compared at once, and others."""

    def __init__(self, names: dict[str, Any], only: Collection[str] | None = None) -> None:
        plain = ["training"]
        self.other: list[tuple[str, _Other]] = []
        self.objects: list[Any] = []
        for name, value in names.items():
            if name in COMMON or (only is not None and name not in only):
                continue
            if _is_plain(value):
                plain.append(name)
                continue
            self.other.append((name, _Other(value)))
            if name not in FORWARDS and _has_settings(value):
                self.objects.append(value)
        self.size: int | None = len(names)
        self.plain = plain
        self.get = itemgetter(*plain)
        self.values = self.get(names)

    def hold(self, names: dict[str, Any]) -> bool:
        return (
            self.size in (None, len(names))
            and self.get(names) == self.values
            and all(found.is_in(names, name) for name, found in self.other)
        )

    def settle(self, names: dict[str, Any]) -> bool:
        """Whether they hold; those that do not are left out from here on."""
        if self.hold(names):
            return True
        values = self.values if len(self.plain) > 1 else (self.values,)
        self.plain = [n for n, v in zip(self.plain, values, strict=True) if names.get(n) is v]
        self.get = itemgetter(*self.plain)
        self.values = self.get(names)
        self.other = [(name, found) for name, found in self.other if found.is_in(names, name)]
        self.size = None
        return False


class _Other:
    """A value that is no plain one: known by identity, a container of plain values by those."""

    __slots__ = ("_copy", "_ref")

    def __init__(self, value: Any) -> None:
        self._copy = _copied(value)
        try:
            self._ref: Callable[[], Any] = ref(value)
        except TypeError:  # lists, dicts and objects with slots
            self._ref = lambda: value

    def is_in(self, names: dict[str, Any], name: str) -> bool:
        now = names.get(name)
        same = now is self._ref() and now is not None
        return same and (self._copy is None or _copied(now) == self._copy)


class _Settings:
    """The attributes of an object that is no module, as far as they can be compared by value."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._names, self._types = list(attributes), list(map(type, attributes.values()))
        plain = [name for name, value in attributes.items() if _is_plain(value)]
        self._get: Callable[[dict[str, Any]], Any] = itemgetter(*plain) if plain else len
        self._values = self._get(attributes)
        containers = [n for n, value in attributes.items() if isinstance(value, CONTAINERS)]
        self._containers = [(name, _copied(attributes[name])) for name in containers]

    def hold(self) -> bool:
        now = self._attributes
        return (
            list(now) == self._names
            and list(map(type, now.values())) == self._types
            and bool(self._get(now) == self._values)
            and all(_copied(now[name]) == copy for name, copy in self._containers)
        )


class Code:
    """The functions of a class, and those that its forward calls by name, as they were."""

    def __init__(self, kind: type) -> None:
        classes = [k for k in kind.__mro__ if k not in (nn.Module, object)]
        self._dicts = [(vars(k), dict(vars(k))) for k in classes]
        found = [vars(k).get(n) for k in classes for n in ("forward", "__call__")]
        functions = [f for f in found if isinstance(f, FunctionType)]
        self._called = [
            (f.__globals__, name, f.__globals__[name])
            for f in functions
            for name in f.__code__.co_names
            if isinstance(f.__globals__.get(name), FUNCTIONS)
        ]

    def holds(self) -> bool:
        return all(now == then for now, then in self._dicts) and all(
            names.get(name) is then for names, name, then in self._called
        )


_codes: WeakKeyDictionary[type, list[Code]] = WeakKeyDictionary()


def code_of(kind: type) -> Code:
    """The code of a class as it is now: the same object as long as it stays, and again when a
    patch of the class is taken off."""
    known = _codes.setdefault(kind, [])
    found = next((code for code in known if _holds(code)), None)
    if found is None:
        found = Code(kind)
        known[:] = [found, *known[:3]]
    return found


def _holds(code: Code) -> bool:
    try:
        return code.holds()
    except (RuntimeError, ValueError, TypeError):
        return False


def hooks_of(module: nn.Module) -> Iterator[dict]:
    """Everything registered on a module that wants to see it being called."""
    own = vars(module)
    yield from (own[name] for name in HOOKS)
    if (registry := own.get("_diffusers_hook")) is not None:
        yield registry.hooks


def is_ours(forward: Any) -> bool:
    return isinstance(forward, MethodType) and hasattr(forward.__func__, MARK)


def is_hooked(module: nn.Module) -> bool:
    """Whether something wants to see this module being called: then call it, do not go around."""
    own = vars(module)
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return True
    if own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return True
    if "_hf_hook" in own or "_diffusers_hook" in own:
        return True
    return "forward" in own and not is_ours(own["forward"])


def all_modules_hooked() -> bool:
    """Whether a hook wants to see every module of the process being called."""
    hooks = global_hooks
    return bool(
        hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )


# as PyTorch has them: somebody may put another forward on a class
PLAIN_KINDS = (nn.Linear, nn.GELU, nn.SiLU, nn.Dropout, nn.LayerNorm, nn.RMSNorm)
PLAIN_FORWARDS = {kind: kind.forward for kind in PLAIN_KINDS}


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a module is PyTorch's own, of no subclass, and computes as PyTorch has it."""
    return type(module) is kind and kind.forward is PLAIN_FORWARDS[kind]


def memory_of(root: nn.Module) -> str | None:
    """Why a module must not be run twice where eager runs it once, or None if it may: something
    inside it is, or may be, told of every run."""
    for module in root.modules():
        if module is not root and is_hooked(module):
            return f"a hook or another forward on {type(module).__name__}"
        if not _is_of_libraries(type(module).forward):
            return f"code of {type(module).__module__} in {type(module).__name__}"
        if effect := effect_of(module):
            return effect
    return None


def effect_of(module: nn.Module) -> str | None:
    """What somebody has put into a module of a library that may do more than compute."""
    name, own = type(module).__name__, vars(module)
    if "forward" in own and not is_ours(own["forward"]) and not _is_of_hooks(own):
        return f"another forward on {name}"
    of_library = type(module).__module__.partition(".")[0] in LIBRARIES
    if of_library and not _is_of_libraries(type(module).forward):
        return f"another forward on the class {name}"
    for key, value in own.items():
        called = key not in FORWARDS and _has_settings(value) and callable(value)
        if called and not _is_of_libraries(type(value).__call__):
            return f"a {type(value).__name__} on {name}"
    return None


def _is_of_hooks(own: dict[str, Any]) -> bool:
    """Whether a forward is one by which accelerate or diffusers call their hooks."""
    return "_hf_hook" in own or "_diffusers_hook" in own


def _is_of_libraries(function: Any) -> bool:
    place = getattr(function, "__globals__", {}).get("__name__") or getattr(
        function, "__module__", None
    )
    return (place or "").partition(".")[0] in LIBRARIES


def _inside_adapters(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Layers of peft, and all that is in them: they are always called, never read."""
    kind = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    if kind is not None:
        for module in modules:
            if isinstance(module, kind):
                yield from module.modules()


def base_layers(root: nn.Module) -> set[int]:
    """The ids of layers that an adapter has been put around."""
    inner = (m._modules.get("base_layer") for m in root.modules())
    return {id(layer) for layer in inner if layer is not None}


def _values(dicts: Iterable[dict]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _kinds(holders: Iterable[dict]) -> tuple[list[type], list[torch.dtype]]:
    """Classes and dtypes of weights. Offload and functional_call put other tensors in their place,
    which changes nothing that was decided; a weight of another kind may."""
    weights = _values(holders)
    return list(map(type, weights)), [w.dtype for w in weights if w is not None]


def _is_plain(value: Any) -> bool:
    if isinstance(value, PLAIN) or type(value) in (FunctionType, BuiltinFunctionType):
        return True
    return type(value) is tuple and all(map(_is_plain, value))


def _copied(value: Any) -> Any:
    """A copy of a list, set or dict of plain values; None for anything else."""
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, list | tuple | set):
        value = list(value)
    else:
        return None
    return [v for v in value if _is_plain(v)]


def _has_settings(value: Any) -> bool:
    """Whether an attribute is an object that may decide what a forward does: a processor of
    diffusers, a config of transformers, an activation that is no module."""
    return hasattr(value, "__dict__") and not isinstance(value, NO_SETTINGS)

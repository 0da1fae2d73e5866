"""Snapshots of modules, which cached results depend on besides their inputs.

Verdicts of first sight, prompt keys and values, rotary tables, descriptions of norms, fp8 weights
and captured graphs are all results of running some modules once. `State` records what such a run
reads from Python: classes and their functions, attributes, children, hooks, processors and configs.
`State.holds` says whether all of that is unchanged. The values of weights are not part of it:
kernels read them in place, and `TensorSamples` covers what is computed from them.

`holds` runs before every forward, so it walks flat lists that were built once, with builtins for
loops: some tenths of a microsecond a module. There is no strong reference to the module that a
`State` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum
from itertools import chain, compress
from operator import attrgetter, getitem, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import ref

import torch
from torch import nn

from ...library_internals import HOOK_ATTRIBUTES
from .class_code import Codes, code_of
from .hooks import COMMON, has_settings, hooks_of, inside_adapters

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, type, slice),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
)
CONTAINERS = (list, dict, set)
NESTED = 3  # how many containers or settings one inside the other are looked into


class State:
    """A snapshot of a module and everything inside it.

    `adapters`: whether to include what peft's layers read (scales, active adapters). A graph needs
    that; a verdict does not, because nothing is fused around such a layer.
    """

    def __init__(self, root: nn.Module, adapters: bool = True) -> None:
        modules = [m for m in root.modules() if isinstance(m._modules, dict)]
        opaque = set() if adapters else set(inside_adapters(modules))
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
        self._child_ids = list(map(id, self._children))
        self._weights = _Weights([d for d in weights if d])
        self._root = _Attributes(vars(root))
        self._names = [vars(m) for m in inner]
        described = [
            _Attributes(vars(m), only=HOOK_ATTRIBUTES if m in opaque else None) for m in inner
        ]
        self._sizes = [a.size for a in described]
        self._plain = [(n, a.get) for n, a in zip(self._names, described, strict=True)]
        self._plain_values = [a.values for a in described]
        self._other = _Others(
            (names, name, found)
            for names, a in zip(self._names, described, strict=True)
            for name, found in a.other
        )
        settings = {id(o): o for a in (self._root, *described) for o in a.objects}.values()
        self._settings = [_Settings(vars(o)) for o in settings]
        classes = dict.fromkeys((type(root), *self._types, *map(type, settings)))
        self._codes = Codes(map(code_of, classes))

    def holds(self, root: nn.Module) -> bool:
        """Whether nothing has changed that a forward of `root` reads from Python."""
        try:
            return (
                type(root) is self._root_type
                and not any(self._empty)
                and list(map(tuple, self._hooked)) == self._hook_ids
                and list(map(len, self._names)) == self._sizes
                and [get(names) for names, get in self._plain] == self._plain_values
                and list(map(id, _values(self._branches))) == self._child_ids
                and list(map(type, self._inner)) == self._types
                and self._weights.hold()
                and self._root.hold(vars(root))
                and self._other.hold()
                and all(map(_Settings.hold, self._settings))
                and self._codes.hold()
            )
        except (LookupError, RuntimeError, ValueError, TypeError):
            return False  # an attribute is gone, or can no longer be compared

    def ignore_changed(self, root: nn.Module) -> bool:
        """Whether attributes have changed since the snapshot; they are ignored from now on. A
        forward that sets attributes of its own module is stateful, and may do so every time."""
        rows = zip(self._names, self._sizes, self._plain, self._plain_values, strict=True)
        kept = [row for row in rows if len(row[0]) == row[1] and row[2][1](row[0]) == row[3]]
        other = [row for row in self._other.rows if _are_in([row])]
        settings = [found for found in self._settings if found.hold()]
        changed = (
            len(kept) < len(self._names)
            or len(other) < len(self._other.rows)
            or len(settings) < len(self._settings)
        )
        self._names = [row[0] for row in kept]
        self._sizes = [row[1] for row in kept]
        self._plain = [row[2] for row in kept]
        self._plain_values = [row[3] for row in kept]
        self._other, self._settings = _Others(other), settings
        return self._root.ignore_changed(vars(root)) or changed


class _Attributes:
    """The attributes of one module: plain values, which are compared in one go, and others."""

    def __init__(self, names: dict[str, Any], only: Collection[str] | None = None) -> None:
        plain = ["training"]
        self.other: list[tuple[str, _Other]] = []
        self.objects: list[Any] = []
        for name, value in names.items():
            if name in COMMON or (only is not None and name not in only):
                continue
            if is_plain_value(value):
                plain.append(name)
                continue
            self.other.append((name, _Other(value)))
            if name not in HOOK_ATTRIBUTES and has_settings(value):
                self.objects.append(value)
        self.size: int | None = len(names)
        self.plain = plain
        self.get = itemgetter(*plain)
        self.values = self.get(names)

    def hold(self, names: dict[str, Any]) -> bool:
        return (
            self.size in (None, len(names))
            and self.get(names) == self.values
            and _are_in([(names, name, found) for name, found in self.other])
        )

    def ignore_changed(self, names: dict[str, Any]) -> bool:
        """Whether some have changed; those are ignored from now on."""
        if self.hold(names):
            return False
        values = self.values if len(self.plain) > 1 else (self.values,)
        self.plain = [n for n, v in zip(self.plain, values, strict=True) if names.get(n) is v]
        self.get = itemgetter(*self.plain)
        self.values = self.get(names)
        self.other = [row for row in self.other if _are_in([(names, *row)])]
        self.size = None
        return True


class _Other:
    """A value that is not plain: compared by identity, and a container by its plain values too."""

    __slots__ = ("contents", "held")

    def __init__(self, value: Any) -> None:
        self.contents = _Contents(value) if isinstance(value, (*CONTAINERS, tuple)) else None
        try:
            self.held: Callable[[], Any] = ref(value)
        except TypeError:  # lists, dicts and objects with slots
            self.held = lambda: value

    @property
    def copy(self) -> Any:
        """A copy of a container of plain values, else None."""
        return None if self.contents is None else self.contents.copy


def _are_in(rows: Iterable[tuple[dict[str, Any], str, _Other]]) -> bool:
    """Whether each of these values is in its dict still, under its name."""
    for names, name, value in rows:
        if name not in names:
            return False
        now = names[name]
        if now is None or now is not value.held():
            return False
        if value.contents is not None and not value.contents.hold(now):
            return False
    return True


def _contents_hold(rows: Iterable[tuple[dict[str, Any], str, _Other]]) -> bool:
    return all(v.contents is None or v.contents.hold(names[name]) for names, name, v in rows)


class _Others:
    """Values of many modules that are not plain. Their identities are compared in one go: an id
    stands for its object as long as that lives, and a weak reference reports when it does not."""

    def __init__(self, rows: Iterable[tuple[dict[str, Any], str, _Other]]) -> None:
        self.rows = list(rows)
        self._dicts = [names for names, _, _ in self.rows]
        self._keys = [name for _, name, _ in self.rows]
        found = [value.held() for _, _, value in self.rows]
        self._ids = list(map(id, found))
        self._gone: list[Any] = []
        self._watched = [_watched(v, self._gone.append) for v in found]
        self._containers = [row for row in self.rows if row[2].contents is not None]
        copied = [row for row in self._containers if row[2].copy is not None]
        self._copied = [names for names, _, _ in copied], [name for _, name, _ in copied]
        self._copies = [value.copy for _, _, value in copied]
        # equal dicts may have their keys in another order, if they have more than one
        self._many = [i for i, v in enumerate(self._copies) if isinstance(v, dict) and len(v) > 1]
        self._orders = [list(self._copies[i]) for i in self._many]
        self._mixed = [row for row in self._containers if row[2].copy is None]

    def hold(self) -> bool:
        return (
            not self._gone
            and list(map(id, map(getitem, self._dicts, self._keys))) == self._ids
            and self._contents_hold()
        )

    def _contents_hold(self) -> bool:
        """Whether the containers, which are the same objects, have the same plain values. Those of
        which all are plain are compared in one go first: a layer of peft has a dozen dicts."""
        now = list(map(getitem, *self._copied))
        if now == self._copies and [list(now[i]) for i in self._many] == self._orders:
            return _contents_hold(self._mixed)
        return _contents_hold(self._containers)


def _watched(value: Any, gone: Callable[[Any], None]) -> ref[Any] | None:
    """A weak reference that calls `gone`; None for what can have none, which its _Other holds."""
    try:
        return ref(value, gone)
    except TypeError:
        return None


class _Weights:
    """Classes and dtypes of weights. Offload and functional_call swap in other tensors, on which no
    decision depends; it may on a weight of another class or dtype."""

    def __init__(self, holders: list[dict]) -> None:
        self._holders = holders
        weights = _values(holders)
        self._types = list(map(type, weights))
        self._are_there = [w is not None for w in weights]
        self._dtypes = list(map(_dtype, compress(weights, self._are_there)))

    def hold(self) -> bool:
        weights = _values(self._holders)
        return (
            list(map(type, weights)) == self._types
            and list(map(_dtype, compress(weights, self._are_there))) == self._dtypes
        )


_dtype = attrgetter("dtype")


class _Settings:
    """The attributes of an object that is not a module, as far as they compare by value."""

    def __init__(self, attributes: dict[str, Any], depth: int = NESTED) -> None:
        self._attributes = attributes
        self._names, self._types = list(attributes), list(map(type, attributes.values()))
        plain = [name for name, value in attributes.items() if is_plain_value(value)]
        self._get: Callable[[dict[str, Any]], Any] = itemgetter(*plain) if plain else len
        self._values = self._get(attributes)
        containers = [n for n, value in attributes.items() if isinstance(value, CONTAINERS)]
        self._containers = [(name, _Contents(attributes[name], depth)) for name in containers]
        self._inner = [
            (name, _Object(value, depth))
            for name, value in attributes.items()
            if not isinstance(value, PLAIN) and _is_settings(value, depth - 1)
        ]

    def hold(self) -> bool:
        now = self._attributes
        return (
            list(now) == self._names
            and list(map(type, now.values())) == self._types
            and bool(self._get(now) == self._values)
            and (
                not self._containers
                or all(contents.hold(now[name]) for name, contents in self._containers)
            )
            and (not self._inner or all(found.hold(now[name]) for name, found in self._inner))
        )


class _Object:
    """An object in a container or among settings: the same one, with the same settings."""

    def __init__(self, value: Any, depth: int) -> None:
        try:
            self._held: Callable[[], Any] = ref(value)
        except TypeError:  # an object with slots
            self._held = lambda: value
        self._settings = None
        if _is_settings(value, depth - 1):
            self._settings = _Settings(vars(value), depth - 1)

    def hold(self, now: Any) -> bool:
        return now is self._held() and (self._settings is None or self._settings.hold())


def _is_settings(value: Any, depth: int) -> bool:
    """Whether an object holds nothing but settings: one with a lock, a file or a module in it may
    count or log, and is no reason to compare anything again."""
    if depth <= 0 or not has_settings(value):
        return False
    return all(
        is_plain_value(v) or isinstance(v, CONTAINERS) or _is_settings(v, depth - 1)
        for v in vars(value).values()
    )


class _Contents:
    """What is in a list, tuple, set or dict: plain values, and other objects, in containers inside
    of it too. Objects that come in later do not count: many a module keeps tables by size."""

    def __init__(self, container: Any, depth: int = NESTED) -> None:
        self._plain = _plain_items(container)
        # if all are plain, they are compared in one go first; others must not be kept alive
        base = next(b for b in (*CONTAINERS, tuple) if isinstance(container, b))
        self.copy = base(container) if len(self._plain) == len(container) else None
        self._keys = list(container) if base is dict else None
        # else by identity first: of the same objects, those that are plain have the same values
        self._ids = None if self.copy is not None else _ids(container)
        self._others = [] if self.copy is not None else _others_in(container, depth)

    def hold(self, container: Any) -> bool:
        if self._ids is not None:
            if not all(found.hold(container[key]) for key, found in self._others):
                return False
            if _ids(container) == self._ids:
                return True
        elif container == self.copy and (self._keys is None or list(container) == self._keys):
            return True
        return _plain_items(container) == self._plain


def _others_in(container: Any, depth: int) -> list[tuple[Any, _Contents | _Object]]:
    """What is not plain in a container, by its key or place."""
    if depth <= 0 or isinstance(container, set):
        return []
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return [
        (
            key,
            _Contents(value, depth - 1)
            if isinstance(value, (*CONTAINERS, tuple))
            else _Object(value, depth),
        )
        for key, value in pairs
        if not is_plain_value(value)
    ]


def _ids(container: Any) -> list[int]:
    ids = list(map(id, container))
    return ids + list(map(id, container.values())) if isinstance(container, dict) else ids


def _values(dicts: Iterable[dict]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def is_plain_value(value: Any) -> bool:
    if isinstance(value, PLAIN) or type(value) in (FunctionType, BuiltinFunctionType):
        return True
    return type(value) is tuple and all(map(is_plain_value, value))


def _plain_items(container: Any) -> list[Any]:
    items = container.items() if isinstance(container, dict) else container
    return [v for v in items if is_plain_value(v)]

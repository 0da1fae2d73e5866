"""Copies of what a block is given and writes to, so that it may run a second time: key-value
caches, and what layers hand each other keys and values in.

A block writes to one layer of a cache. To compare two forwards, or to record one, the other run
gets a copy of that layer as it was before.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ...fuser.cached_attention import LAYER_INDEX
from ...library_internals import (
    CACHE_UPDATES,
    is_kv_cache,
    is_shared_states,
    plain_cache_layers,
    refuse_update,
    writes_in_place,
)
from .input_key import is_plain


def can_copy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all inputs that a block may write to can be copied: caches of which it has layers,
    and states that layers share."""
    others = [v for v in (*args, *kwargs.values()) if not (is_plain(v) or is_shared_states(v))]
    if not others:
        return True
    own = _places(module)
    return bool(own) and all(plain_cache_layers(v, own) is not None for v in others)


class CacheCopies:
    """The caches and shared states among the inputs of a block as they are now."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._own = _places(module)
        self._real = [v for v in (*args, *kwargs.values()) if _is_copied(v)]
        self._kept = [self._copied(cache) for cache in self._real]
        self._given: list[Any] = []

    @staticmethod
    def of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CacheCopies | None:
        """None if there are none among the inputs."""
        if not any(map(_is_copied, (*args, *kwargs.values()))):
            return None
        return CacheCopies(module, args, kwargs)

    def given(self) -> tuple[Any, Any]:
        """The inputs with copies that nobody has written to since."""
        return self.instead_in(self._args, self._kwargs)

    def instead_in(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None = None
    ) -> tuple[Any, Any]:
        """Other inputs with such copies in the place of the real ones, in a dtype."""
        self._given = [self._copied(cache, dtype) for cache in self._kept]
        instead = {id(v): c for v, c in zip(self._real, self._given, strict=True)}
        found = tuple([instead.get(id(v), v) for v in args])
        return found, {name: instead.get(id(v), v) for name, v in kwargs.items()}

    def written(self) -> tuple[list[Any], list[Any]]:
        """What the copies that were given last hold, and what the real ones do."""
        return self._contents(self._given), self._contents(self._real)

    def hold_one_token(self) -> bool:
        """Whether the real caches hold no more: attention to one key has the same bits whatever is
        done with its score."""
        caches = filter(is_kv_cache, self._real)
        layers = [c.layers[i] for c in caches for i in self._own if -1 < i < len(c.layers)]
        return any(int(layer.get_seq_length()) <= 1 for layer in layers)

    def take_over(self) -> None:
        """Have the real ones hold what was written to the copies that were given last."""
        for real, given in zip(self._real, self._given, strict=True):
            if is_shared_states(real):
                real.update(given)
                continue
            count = len(real.layers)
            for i in self._own & set(range(count)):
                _take_over(real.layers[i], given.layers[i])
            real.layers += given.layers[count:]

    def _copied(self, cache: Any, dtype: torch.dtype | None = None) -> Any:
        made = copy.copy(cache)
        if is_shared_states(cache):  # nobody writes to the tensors in it
            if dtype is not None:
                made.update({k: _widened(v, dtype) for k, v in cache.items()})
            return made
        made.layers = [
            _copied(layer, dtype) if i in self._own else _read_only(layer)
            for i, layer in enumerate(cache.layers)
        ]
        return made

    def _contents(self, caches: list[Any]) -> list[Any]:
        found: list[Any] = []
        for cache in caches:
            if is_shared_states(cache):
                found.append(dict(cache))
                continue
            found += [
                sorted((name, v) for name, v in vars(cache.layers[i]).items() if name in CONTENTS)
                for i in sorted(self._own)
                if i < len(cache.layers)
            ]
        return found


def _is_copied(value: Any) -> bool:
    return is_kv_cache(value) or is_shared_states(value)


def _widened(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple | list):
        return type(value)([_widened(v, dtype) for v in value])
    return value.to(dtype) if value.is_floating_point() else value


def _places(module: nn.Module) -> set[int]:
    """Which layers of a cache belong to a block."""
    found = (vars(m).get(LAYER_INDEX) for m in module.modules())
    return {i for i in found if isinstance(i, int)}


# of a layer of a cache; the others are how it was made
CONTENTS = ("keys", "values", "cumulative_length", "cumulative_length_int", "is_initialized")


def _copied(layer: Any, dtype: torch.dtype | None) -> Any:
    made = copy.copy(layer)
    for name, value in vars(layer).items():
        if not isinstance(value, Tensor):
            continue
        # an inference tensor could not be written to where a forward is recorded
        with torch.inference_mode(False), torch.no_grad():
            new = value.clone() if writes_in_place(layer) else value
            widens = dtype is not None and new.is_floating_point()
            setattr(made, name, new.to(dtype) if widens else new)
    if dtype is not None and hasattr(made, "dtype"):
        made.dtype = dtype
    return made


def _read_only(layer: Any) -> Any:
    """A layer that belongs to another block."""
    made = copy.copy(layer)
    for name in CACHE_UPDATES:
        setattr(made, name, refuse_update)
    return made


def _take_over(layer: Any, given: Any) -> None:
    for name, value in vars(given).items():
        now = vars(layer).get(name)
        if isinstance(now, Tensor) and writes_in_place(layer):
            now.copy_(value)  # graphs hold the tensor itself
        else:
            setattr(layer, name, value)

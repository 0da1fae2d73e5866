"""The signature of a forward's inputs: their shapes, dtypes and devices."""

from __future__ import annotations

from itertools import count
from typing import Any

from torch import Tensor, nn

from ...backends.torch_internals import pytree
from ...fuser.watched_forward import PLAIN
from ..state.hooks import COMMON

CONTAINERS = (list, tuple, dict)
WRITES_TO_INPUT = "an input that it may write to"


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The key under which verdicts on a forward are kept. The length of a mask is not part of it:
    it grows with every generated token, and no fusion depends on it."""
    return (
        tuple([_key_of(a) for a in args]),
        tuple([(k, _mask_key(v) if "mask" in k else _key_of(v)) for k, v in kwargs.items()]),
    )


_numbers: dict[Any, int] = {}
_next = count(1)
MAX_NUMBERS = 4096


def number_of(key: Any) -> int:
    """The number of a key: the same for equal keys. All blocks of a forward have one signature and
    one setting of PyTorch's switches; a number is hashed and compared faster than those."""
    found = _numbers.get(key)
    if found is None:
        if len(_numbers) >= MAX_NUMBERS:  # a service that keeps getting new shapes
            _numbers.clear()
        found = _numbers.setdefault(key, next(_next))
    return found


def has_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an input is an object that a forward may write to, such as a key-value cache."""
    return not all(map(is_plain, (*args, *kwargs.values())))


def is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, PLAIN)


def versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Id and version counter of every input: a forward that writes to one changes them."""
    return [
        (id(v), v._version if isinstance(v, Tensor) and not v.is_inference() else 0)
        for v in pytree.tree_leaves((args, kwargs))
    ]


def held_by(root: nn.Module) -> list[Tensor]:
    """The tensors that modules hold: weights, buffers and other attributes."""
    found: list[Any] = []
    for module in root.modules():
        found += [*module._parameters.values(), *module._buffers.values()]
        own = vars(module)
        for name in own.keys() - COMMON:
            value = own[name]
            found += pytree.tree_leaves(value) if isinstance(value, CONTAINERS) else [value]
    return [v for v in found if isinstance(v, Tensor)]


def on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an input is a meta tensor, which has no values."""
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(v, Tensor) and v.is_meta for v in leaves)


def in_words(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Shape and dtype of the first tensor of a call, for messages."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "its inputs"


def _key_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device
    if value is None or isinstance(value, (bool, str)):  # a union is built anew each time
        return value
    if isinstance(value, (tuple, list)):
        return tuple([_key_of(v) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _key_of(v)) for k, v in value.items()])
    return type(value)


def _mask_key(mask: Any) -> Any:
    return (mask.ndim, mask.dtype) if isinstance(mask, Tensor) else _key_of(mask)

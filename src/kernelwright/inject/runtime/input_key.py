"""What decides how a forward runs: shapes and dtypes of what it is given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...backends.torch_internals import pytree

PLAIN = (Tensor, bool, int, float, str, type(None))


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inputs of one signature are treated alike. The length of a mask is no part of it: it grows
    with every generated token, and decides nothing that is fused."""
    return (
        tuple([_mark(a) for a in args]),
        tuple([(k, _loose(v) if "mask" in k else _mark(v)) for k, v in kwargs.items()]),
    )


def has_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an input is an object that a forward may write to, such as a key-value cache."""
    return not all(map(_is_plain, (*args, *kwargs.values())))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, PLAIN)


def facts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What changes if a forward writes to its inputs."""
    return [
        (id(v), v._version if isinstance(v, Tensor) and not v.is_inference() else 0)
        for v in pytree.tree_leaves((args, kwargs))
    ]


def on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an input has no values."""
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(v, Tensor) and v.is_meta for v in leaves)


def in_words(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The first tensor of a call in words."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "its inputs"


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, tuple | list):
        return tuple([_mark(v) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _mark(v)) for k, v in value.items()])
    return type(value)


def _loose(mask: Any) -> Any:
    return (mask.ndim, mask.dtype) if isinstance(mask, Tensor) else _mark(mask)

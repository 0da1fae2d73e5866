"""Errors before a launch: each names the op, the argument, what came and what is accepted."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

EIGHT = (torch.float8_e4m3fn, torch.int8)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# schema type -> accepted Python types, and what an error message says is expected
KINDS: Mapping[str, tuple[Any, str]] = {
    "float": (int | float | torch.SymFloat | torch.SymInt, "a number"),
    "int": (int | torch.SymInt, "a whole number"),
    "bool": (bool | torch.SymBool, "True or False"),
    "str": (str, "a string"),
}
LARGEST = sys.float_info.max


def kinds(op: str, arguments: Sequence[tuple[str, str]], values: Sequence[Any]) -> None:
    """Check each value against the type in the schema. A tensor is not a number: a plan keeps
    numbers, and the value in a tensor may change."""
    for (name, kind), value in zip(arguments, values, strict=True):
        if kind.startswith("Tensor"):
            if value is not None or not kind.endswith("?"):
                dense(op, name, value)
            continue
        plain = kind.removesuffix("?")
        if value is None and plain != kind:
            continue
        types, expected = KINDS.get(plain, (object, "another value"))
        if not isinstance(value, types) or (isinstance(value, bool) and plain != "bool"):
            # strings and bools are one of a few values: a ValueError, as from `choice`
            error = ValueError if plain in ("bool", "str") else TypeError
            optional = " or None" if plain != kind else ""
            raise error(f"{op}: {name} is {shown(value)}, expected {expected}{optional}")


def how(
    op: str, exact: Any, chains: Iterable[str], backend: Any, backends: tuple[str, ...]
) -> None:
    """Check the names of the eager chain and of the backend."""
    if exact is not None and not (isinstance(exact, str) and exact in chains):
        known = ", ".join(map(repr, chains)) or "none"
        raise ValueError(f"{op}: exact is {shown(exact)}, known chains are {known}")
    if backend is not None:
        choice(op, "backend", backend, backends)


def common(
    op: str,
    values: Mapping[str, Any],
    eight: Collection[str] = (),
    integers: Collection[str] = (),
) -> None:
    """Checks of every op: dense floating tensors on one device, finite numbers, eps >= 0. The
    arguments named in `eight` are float8_e4m3fn or int8, those in `integers` int64."""
    first: tuple[str, Tensor] | None = None
    for name, value in values.items():
        if isinstance(value, Tensor):
            dense(op, name, value)
            if name in eight:
                if value.dtype not in EIGHT:
                    raise TypeError(
                        f"{op}: {name} is {value.dtype}, expected float8_e4m3fn or int8"
                    )
            elif name in integers:
                if value.dtype != torch.int64:
                    raise TypeError(f"{op}: {name} is {value.dtype}, expected int64")
            elif value.dtype not in DTYPES:
                raise TypeError(
                    f"{op}: {name} is {value.dtype}, expected float16, bfloat16 or float32"
                )
            if first is None:
                first = name, value
            elif value.device != first[1].device:
                raise ValueError(
                    f"{op}: {name} is on {value.device}, {first[0]} is on {first[1].device}"
                )
        elif name == "eps":
            finite(op, name, value)
            if value < 0:
                raise ValueError(f"{op}: eps is {value!r}, expected a finite number, zero or above")
        elif isinstance(value, float):
            finite(op, name, value)
    if first is None:
        name = next(iter(values))
        raise TypeError(f"{op}: {name} is {shown(values[name])}, expected a tensor")


def dense(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is {type(value).__name__}, expected a tensor")
    if value.is_nested:
        raise TypeError(f"{op}: {name} is a nested tensor, expected a dense tensor")
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} is {value.layout}, expected a dense tensor")


def tensor(op: str, name: str, value: Any, min_dims: int = 1) -> None:
    dense(op, name, value)
    if value.ndim < min_dims:
        raise ValueError(f"{op}: {name} has {value.ndim} dimensions, expected {min_dims} or more")


def vector(op: str, name: str, value: Any, width: int, against: str = "input") -> None:
    """An optional [D] tensor of the row's width."""
    if value is None:
        return
    tensor(op, name, value)
    if value.ndim != 1:
        raise ValueError(f"{op}: {name} has shape {list(value.shape)}, expected [{width}]")
    if value.shape[0] != width:
        raise ValueError(f"{op}: {name} has {value.shape[0]} elements, {against} has width {width}")


def like(op: str, name: str, value: Any, other: Tensor, against: str) -> None:
    """A tensor of the same shape and dtype as another."""
    tensor(op, name, value)
    if value.shape != other.shape:
        raise ValueError(
            f"{op}: {name} has shape {list(value.shape)}, {against} has {list(other.shape)}"
        )
    if value.dtype != other.dtype:
        raise TypeError(f"{op}: {name} is {value.dtype}, {against} is {other.dtype}")


def choice(op: str, name: str, value: Any, accepted: Sequence[Any]) -> None:
    # the type first: 1 == True, and tensors and arrays compare element by element
    if not isinstance(value, type(accepted[0])) or value not in accepted:
        raise ValueError(f"{op}: {name} is {shown(value)}, expected one of {tuple(accepted)}")


def finite(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat):
        raise TypeError(f"{op}: {name} is {shown(value)}, expected a number")
    if not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{op}: {name} is {shown(value)}, expected a finite number")


def shown(value: Any) -> str:
    """A value as errors print it, kept short: a number may have a million digits."""
    if isinstance(value, Tensor):
        return "a tensor"
    try:
        text = repr(value)
    except Exception:  # repr of the caller's object fails, or the number has too many digits
        text = ""
    return text if 0 < len(text) <= 60 else f"of type {type(value).__name__}, too long to show"


def outputs(
    op: str,
    names: Sequence[str],
    given: Sequence[Tensor | None],
    wanted: Sequence[Tensor],
    args: Sequence[Any],
) -> None:
    """Tensors passed as out=: right shape, dtype and device, writable, rows without gaps."""
    device = next(a.device for a in args if isinstance(a, Tensor))
    for name, o, w in zip(names, given, wanted, strict=True):
        if o is None:
            continue
        dense(op, name, o)
        # torch.compile cannot trace is_neg, and its copy into such a view is right anyway
        if not torch.compiler.is_compiling() and o.is_neg():
            raise ValueError(
                f"{op}: {name} is a negative view (its is_neg() is True), whose memory has the "
                f"other sign; pass a tensor that is none"
            )
        if o.shape != w.shape:
            raise ValueError(f"{op}: {name} has shape {list(o.shape)}, expected {list(w.shape)}")
        if o.dtype != w.dtype:
            raise TypeError(f"{op}: {name} is {o.dtype}, expected {w.dtype}")
        if o.device != device:
            raise ValueError(f"{op}: {name} is on {o.device}, the inputs are on {device}")
        if o.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: {name} requires grad; pass a tensor that does not")
        if o.ndim and o.shape[-1] > 1 and o.stride(-1) != 1:
            raise ValueError(
                f"{op}: {name} has stride {o.stride(-1)} in its last dimension, expected 1"
            )
        if any(n > 1 and s == 0 for n, s in zip(o.shape, o.stride(), strict=True)):
            raise ValueError(f"{op}: {name} is expanded; its elements share memory")


def modulation(op: str, name: str, value: Any, x: Tensor, against: str = "input") -> None:
    """An optional scale, shift or gate: [D], [B, D], [B, 1, D], [B, S, D] or [B, F, 1, D]."""
    if value is None:
        return
    tensor(op, name, value)
    width, shape = x.shape[-1], list(value.shape)
    if shape[-1] != width:
        raise ValueError(f"{op}: {name} has width {shape[-1]}, {against} has width {width}")
    if value.ndim == 1:
        return
    if value.ndim == 2 and x.ndim > 2:
        fits = shape[0] in (1, x.shape[0])
    elif value.ndim == x.ndim + 1 == 4:
        tokens = x.shape[1]
        fits = shape[0] in (1, x.shape[0]) and shape[2] == 1
        fits = fits and shape[1] > 0 and tokens % shape[1] == 0
    else:
        fits = value.ndim == x.ndim and all(
            a in (1, b) for a, b in zip(shape, x.shape, strict=True)
        )
    if not fits:
        raise ValueError(
            f"{op}: {name} has shape {shape}, which does not spread over {against} "
            f"{list(x.shape)}; accepted are [D], [B, D], [B, 1, D], [B, S, D] and [B, F, 1, D]"
        )


def one_dtype(op: str, values: Mapping[str, Any]) -> None:
    """Optional tensors that must share a dtype, such as scale and shift."""
    found = {n: t.dtype for n, t in values.items() if isinstance(t, Tensor)}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{n} is {d}" for n, d in found.items())
        raise TypeError(f"{op}: {listed}; expected one dtype")

"""Shapes of the adaptive norms: every way a modulation comes, contiguous and as views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..case import Case, Inputs, Sized

# how models hand over (scale, shift, gate) for tokens [B, S, D]
MODULATIONS: dict[str, Callable[[Inputs, int, int, int], tuple[Tensor, ...]]] = {
    "[D]": lambda i, b, s, d: tuple(i.normal(d) for _ in range(3)),
    "[B, D]": lambda i, b, s, d: i.normal(b, 3 * d).chunk(3, dim=1),
    "[B, 1, D] of unbind": lambda i, b, s, d: i.normal(b, 1, 6, d).unbind(2)[:3],
    "[B, S, D]": lambda i, b, s, d: tuple(i.normal(b, s, d) for _ in range(3)),
    "[B, S, D] of chunk": lambda i, b, s, d: i.normal(b, s, 6 * d).chunk(6, dim=2)[1:4],
    "[B, F, 1, D]": lambda i, b, s, d: tuple(i.normal(b, s // 3, 1, d) for _ in range(3)),
}


def _case(
    x: str, parts: tuple[str, ...], shape: tuple[int, int, int], how: str, **more: Any
) -> Any:
    def arguments(inputs: Inputs) -> dict[str, Any]:
        b, s, d = shape
        made = dict(zip(("scale", "shift", "gate"), MODULATIONS[how](inputs, b, s, d), strict=True))
        given: dict[str, Any] = {x: inputs.normal(b, s, d)}
        for name in parts:
            given[name] = made[name]
        for name, value in more.items():
            given[name] = inputs.weight(d) if value == "weight" else value
        return given

    return arguments


def in_float32(arguments: Any) -> Any:
    """The same with its modulation in float32, as Wan has it."""

    def widened(inputs: Inputs) -> dict[str, Any]:
        given = arguments(inputs)
        parts = {n: given[n].float() for n in ("scale", "shift", "gate") if n in given}
        return given | parts

    return widened


WAN = (1, 32760, 1536)


def _all(x: str, parts: tuple[str, ...], **more: Any) -> list[Case]:
    small = [Case(how, _case(x, parts, (2, 6, 64), how, **more)) for how in MODULATIONS]
    odd = Case("odd width", _case(x, parts, (2, 3, 123), "[B, D]", **more))
    none = dict.fromkeys(parts)
    absent = Case("no modulation", _case(x, (), (2, 3, 96), "[D]", **{**more, **none}))
    empty = Case("no tokens", _case(x, parts, (2, 0, 64), "[B, D]", **more))
    models = [
        Case(
            f"{preset} {'x'.join(map(str, shape))}",
            _case(x, parts, shape, how, **more),
            True,
            preset,
        )
        for preset, shape, how in (
            ("ltx", (2, 2688, 2048), "[B, 1, D] of unbind"),
            ("flux", (1, 4608, 3072), "[B, D]"),
        )
    ]
    return [*small, odd, absent, empty, *models]


_PAIR = ("scale", "shift")
MODULATE = _all("x", _PAIR)
ADALN_RMSNORM = [
    *_all("input", _PAIR, weight=None, eps=1e-6),
    Case("weight", _case("input", _PAIR, (2, 6, 1152), "[B, D]", weight="weight", eps=1e-6)),
]
ADALN_LAYERNORM = [
    *_all("input", _PAIR, weight=None, bias=None, eps=1e-6),
    Case(
        "affine",
        _case("input", _PAIR, (2, 6, 1152), "[B, D]", weight="weight", bias="weight", eps=1e-6),
    ),
    Case(
        "wan 32760x1536",
        in_float32(
            _case("input", _PAIR, WAN, "[B, 1, D] of unbind", weight=None, bias=None, eps=1e-6)
        ),
        True,
        "wan",
    ),
]
ADALN_ZERO = _all("input", (*_PAIR, "gate"), weight="weight", eps=1e-6)


def tokens(rows: int, width: int) -> tuple[int, int, int]:
    """`rows` as [B, S, D], in two batches where they can be shared out."""
    return (2, rows // 2, width) if rows % 2 == 0 else (1, rows, width)


def _sized(x: str, parts: tuple[str, ...], **more: Any) -> Sized:
    def arguments(inputs: Inputs, rows: int, width: int, chain: str) -> dict[str, Any]:
        return _case(x, parts, tokens(rows, width), "[B, 1, D] of unbind", **more)(inputs)

    return arguments


sized_modulate = _sized("x", _PAIR)
sized_rmsnorm = _sized("input", _PAIR, weight="weight", eps=1e-6)
sized_layernorm = _sized("input", _PAIR, weight=None, bias=None, eps=1e-6)
sized_zero = _sized("input", (*_PAIR, "gate"), weight=None, eps=1e-6)

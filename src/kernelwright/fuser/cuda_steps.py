"""C++ of single steps with PyTorch's bits: what it computes for one element, and its rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..backends import Unsupported
from ..backends.cuda import TYPES
from .expression import Step
from .lowering import PRODUCT, Normed

aten: Any = torch.ops.aten


def type_name(dtype: torch.dtype) -> str:
    names = {**TYPES, torch.float64: "double"}
    names |= {torch.bool: "bool", torch.int64: "i64", torch.int32: "int"}
    if dtype not in names:
        raise Unsupported(f"tensors of {dtype}")
    return names[dtype]


def computed_type(dtype: torch.dtype) -> str:
    """The type in which values of a dtype are computed."""
    return "double" if dtype == torch.float64 else "float"


def float_literal(value: float) -> str:
    return f"{torch.tensor(value, dtype=torch.float32).item()!r}f"


def number(value: Any) -> str:
    if isinstance(value, bool):
        return "1.f" if value else "0.f"
    return float_literal(float(value)) if isinstance(value, int | float) else ""


def normed(of: str, e: Normed, given: list[str], exact: bool) -> str:
    x, weight, bias = (*given, "", "")[:3]
    rounding = f"Each<{type_name(e.dtype)}>" if exact else "Once"
    return (
        f"{of}.template apply<{rounding}>({x}, {_flag(weight)}, {weight or '1.f'}, "
        f"{_flag(bias)}, {bias or '0.f'})"
    )


def _flag(text: str) -> str:
    return "true" if text else "false"


def _binary(function: str) -> Callable[..., str]:
    return lambda a, b, **_: f"{function}({a}, {b})"


def _compared(sign: str) -> Callable[..., str]:
    return lambda a, b: f"({a} {sign} {b} ? 1.f : 0.f)"


def _both(sign: str) -> Callable[..., str]:
    """On truth values alone: bits of whole numbers do not fit in a float."""
    return lambda a, b: f"({a} != 0.f {sign} {b} != 0.f ? 1.f : 0.f)"


def _power(a: str, exponent: Any) -> str:
    value = float(exponent.rstrip("f"))
    if value == 1:
        return a
    if value == 2:
        return f"__fmul_rn({a}, {a})"
    if value == 0.5:
        return f"__fsqrt_rn({a})"
    raise Unsupported(f"a power of {value}")


STEPS: dict[Any, Callable[..., str]] = {
    aten.add: _binary("__fadd_rn"),
    aten.sub: _binary("__fsub_rn"),
    aten.mul: _binary("__fmul_rn"),
    aten.div: _binary("__fdiv_rn"),
    aten.rsub: lambda a, b, **_: f"__fsub_rn({b}, {a})",
    aten.neg: lambda a: f"(-{a})",
    aten.pow: _power,
    aten.square: lambda a: f"__fmul_rn({a}, {a})",
    aten.rsqrt: lambda a: f"rsqrtf({a})",
    aten.sqrt: lambda a: f"__fsqrt_rn({a})",
    aten.reciprocal: lambda a: f"__fdiv_rn(1.f, {a})",
    aten.exp: lambda a: f"expf({a})",
    aten.sin: lambda a: f"sinf({a})",
    aten.cos: lambda a: f"cosf({a})",
    aten.tanh: lambda a: f"tanhf({a})",
    aten.sigmoid: lambda a: f"logistic<false>(1.f, {a})",
    aten.silu: lambda a: f"logistic<false>({a}, {a})",
    aten.silu_backward: lambda a, b: f"silu_backward({a}, {b})",
    aten.relu: lambda a: f"({a} <= 0.f ? 0.f : {a})",
    aten.abs: lambda a: f"fabsf({a})",
    aten.where: lambda c, a, b: f"({c} != 0.f ? {a} : {b})",
    aten.eq: _compared("=="),
    aten.ne: _compared("!="),
    aten.lt: _compared("<"),
    aten.le: _compared("<="),
    aten.gt: _compared(">"),
    aten.ge: _compared(">="),
    aten.logical_not: lambda a: f"({a} == 0.f ? 1.f : 0.f)",
    **dict.fromkeys((aten.logical_and, aten.bitwise_and), _both("&&")),
    **dict.fromkeys((aten.logical_or, aten.bitwise_or), _both("||")),
    aten.bitwise_not: lambda a: f"({a} == 0.f ? 1.f : 0.f)",
    # as nvcc contracts the products of c10::complex
    PRODUCT[0]: lambda a, b, c, d: f"__fmaf_rn({a}, {c}, -__fmul_rn({b}, {d}))",
    PRODUCT[1]: lambda a, b, c, d: f"__fmaf_rn({a}, {d}, __fmul_rn({b}, {c}))",
    aten._to_copy: lambda a, **_: a,
    aten.clone: lambda a, **_: a,
    aten.addcmul: lambda a, b, c, **_: f"__fmaf_rn({b}, {c}, {a})",
    aten.full: lambda a: a,
    aten.maximum: _binary("fmaxf"),
    aten.minimum: _binary("fminf"),
}
# the few that positions are rotated with
STEPS_OF_DOUBLES: dict[Any, Callable[..., str]] = {
    aten.add: _binary("__dadd_rn"),
    aten.sub: _binary("__dsub_rn"),
    aten.mul: _binary("__dmul_rn"),
    aten._to_copy: lambda a, **_: f"double({a})",
    aten.clone: lambda a, **_: a,
    PRODUCT[0]: lambda a, b, c, d: f"__fma_rn({a}, {c}, -__dmul_rn({b}, {d}))",
    PRODUCT[1]: lambda a, b, c, d: f"__fma_rn({a}, {d}, __dmul_rn({b}, {c}))",
}
COMPARISONS = frozenset(getattr(aten, n) for n in ("eq", "ne", "lt", "le", "gt", "ge"))
TRUTH = frozenset(
    getattr(aten, name)
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or"),
        *("bitwise_and", "bitwise_or", "bitwise_not", "_to_copy", "clone", "where"),
    )
)
GELU = {"none": "GeluErf<false>::of", "tanh": "GeluTanh<false>::of"}
GELU_BACKWARD = {"none": "gelu_erf_backward", "tanh": "gelu_tanh_backward"}
# those of fuser/gradients.cuh
GRADIENTS = frozenset((aten.silu_backward, aten.gelu_backward))


def step_maker(e: Step, types: list[torch.dtype | None], exact: bool) -> Callable[[list[str]], str]:
    """What makes one lane of a step, rounded to its dtype if `exact`."""
    packet = getattr(e.op, "overloadpacket", e.op)
    kwargs = dict(e.kwargs)
    if e.dtype.is_complex or any(t is not None and t.is_complex for t in types):
        raise Unsupported("complex numbers")
    if any(t in (torch.int64, torch.int32) for t in (*types, e.dtype)):
        raise Unsupported("whole numbers")
    if e.dtype == torch.float64:
        return _of_doubles(packet, e, types)
    if torch.float64 in types:
        if packet is not aten._to_copy:
            raise Unsupported(f"{e.op} of float64")
        return lambda a: _rounded(f"float({a[0]})", e.dtype, exact)
    if e.dtype == torch.bool and packet is aten.mul:
        packet = aten.logical_and
    bits = packet in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_not)
    if bits and e.dtype != torch.bool:
        raise Unsupported("bits of whole numbers")
    if e.dtype == torch.bool and packet not in TRUTH:
        raise Unsupported(f"{e.op} of truth values")
    if kwargs.pop("alpha", 1) != 1 or kwargs.pop("value", 1) != 1:
        raise Unsupported(f"{e.op} with a factor")
    if kwargs.pop("rounding_mode", None) is not None:
        raise Unsupported(f"{e.op} with a rounding of its own")
    if packet is aten.gelu:
        name = GELU[kwargs.get("approximate", "none")]
        return lambda a: _rounded(f"{name}({a[0]})", e.dtype, exact)
    if packet is aten.gelu_backward:
        name = GELU_BACKWARD[kwargs.get("approximate", "none")]
        return lambda a: _rounded(f"{name}({a[0]}, {a[1]})", e.dtype, exact)
    if packet is aten.pow and e.args[1] == 3:
        # two products, each rounded to the dtype
        return lambda a: _rounded(
            f"__fmul_rn({_rounded(f'__fmul_rn({a[0]}, {a[0]})', e.dtype, exact)}, {a[0]})",
            e.dtype,
            exact,
        )
    make = STEPS.get(packet)
    if make is None:
        raise Unsupported(f"{e.op} has no code here")
    if packet in COMPARISONS and types[-1] is None and types[0] is not None:
        # PyTorch rounds the number to the dtype that it compares in
        border = float_literal(torch.tensor(e.args[1], dtype=types[0]).item())
        return lambda a: _rounded(make(a[0], border), e.dtype, exact)
    return lambda a: _rounded(make(*a), e.dtype, exact)


def _of_doubles(
    packet: Any, e: Step, types: list[torch.dtype | None]
) -> Callable[[list[str]], str]:
    make = STEPS_OF_DOUBLES.get(packet)
    if make is None or dict(e.kwargs).get("alpha", 1) != 1 or None in types:
        raise Unsupported(f"{e.op} of float64")
    return lambda a: make(*a)


def _rounded(text: str, dtype: torch.dtype, exact: bool) -> str:
    if dtype == torch.bool:
        return f"({text} != 0.f ? 1.f : 0.f)"
    if dtype == torch.float32 or not exact:
        return text
    return f"rounded<{type_name(dtype)}>({text})"

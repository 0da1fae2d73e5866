"""C++ of single steps, for one element: with PyTorch's bits and their rounding, or with none of it
between steps."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch

from ..backends import Unsupported
from ..backends.cuda import TYPES
from ..ops import ways
from .expression import Step
from .expression import rounded as rounded_step
from .lowering import MULTIPLY_ADD, OF_A_NORM, PRODUCT, Lowered

aten: Any = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


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


def normed(of: str, given: list[str], exact: bool) -> str:
    """An element of a norm's result, not rounded yet."""
    x, weight, bias = (*given, "", "")[:3]
    if exact and bias and not weight:
        raise Unsupported("F.layer_norm with a bias and no weight")
    rounding = "Each<float>" if exact else "Once"
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


def _member(name: str) -> Callable[..., str]:
    return lambda a: f"{a}.{name}"


def _larger(a: str, b: str) -> str:
    return f"({a} != {a} ? {a} : {b} != {b} ? {b} : fmaxf({a}, {b}))"  # NaN stays NaN


def _smaller(a: str, b: str) -> str:
    return f"({a} != {a} ? {a} : {b} != {b} ? {b} : fminf({a}, {b}))"


def _clamp(e: Step) -> Callable[[list[str]], str]:
    """Between numbers, first not below the lower one; NaN stays NaN."""
    given = {**dict(zip(("min", "max"), e.args[1:], strict=False)), **dict(e.kwargs)}
    if e.op is aten.clamp_max.default:
        given = {"max": given.get("max", given.get("min"))}
    limits = [given.get("min"), given.get("max")]
    if not all(v is None or (isinstance(v, int | float) and isfinite(v)) for v in limits):
        raise Unsupported(f"{e.op} between other than finite numbers")

    def make(a: list[str]) -> str:
        text = a[0]
        for function, limit in zip(("fmaxf", "fminf"), limits, strict=True):
            if limit is not None:
                text = f"{function}({text}, {number(limit)})"
        return f"({a[0]} != {a[0]} ? {a[0]} : {text})"

    return make


STEPS: dict[Any, Callable[..., str]] = {
    aten.add: _binary("__fadd_rn"),
    aten.sub: _binary("__fsub_rn"),
    aten.mul: _binary("__fmul_rn"),
    aten.div: _binary("__fdiv_rn"),
    aten.rsub: lambda a, b, **_: f"__fsub_rn({b}, {a})",
    aten.neg: lambda a: f"(-{a})",
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
    aten.leaky_relu: lambda a, slope="0.01f": f"({a} > 0.f ? {a} : __fmul_rn({a}, {slope}))",
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
    MULTIPLY_ADD: lambda a, b, c: f"__fmaf_rn({a}, {b}, {c})",
    **{op: _member(name) for name, op in OF_A_NORM.items()},
    aten._to_copy: lambda a, **_: a,
    aten.clone: lambda a, **_: a,
    aten.addcmul: lambda a, b, c, **_: f"__fmaf_rn({b}, {c}, {a})",
    aten.full: lambda a: a,
    rounded_step: lambda a: a,  # its result is rounded
    aten.maximum: _larger,
    aten.minimum: _smaller,
}
# with the same bits where the operand has 16
STEPS_OF_16_BITS: dict[Any, Callable[..., str]] = {
    aten.sigmoid: lambda a: f"logistic_of_16_bits(1.f, {a})",
    aten.silu: lambda a: f"logistic_of_16_bits({a}, {a})",
}
# where nothing is rounded between steps: products and sums may become one instruction
STEPS_AT_ONCE: dict[Any, Callable[..., str]] = {
    aten.add: lambda a, b, **_: f"({a} + {b})",
    aten.sub: lambda a, b, **_: f"({a} - {b})",
    aten.mul: lambda a, b, **_: f"({a} * {b})",
    aten.rsub: lambda a, b, **_: f"({b} - {a})",
    aten.square: lambda a: f"({a} * {a})",
}
# the same for results of 16 bits: within two units of float32's last place
FAST_STEPS_AT_ONCE: dict[Any, Callable[..., str]] = {
    aten.sigmoid: lambda a: f"logistic<true>(1.f, {a})",
    aten.silu: lambda a: f"logistic<true>({a}, {a})",
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
# functions whose arithmetic is that of CUDA's mathematical library, by their subject in `ways`
SUBJECTS = {
    aten.rsqrt: "rsqrt",
    aten.exp: "exp",
    aten.sin: "sin",
    aten.cos: "cos",
    aten.tanh: "tanh",
    aten.sigmoid: "sigmoid",
    aten.silu: "silu",
}
# a step of these on 16-bit numbers has one of them as its result: there is nothing to round
EXACT = frozenset(
    getattr(aten, name)
    for name in ("neg", "abs", "relu", "clone", "_to_copy", "where", "maximum", "minimum")
)
# powers for which PyTorch calls another function on a GPU
POWERS = {0.5: aten.sqrt, -0.5: aten.rsqrt, -1.0: aten.reciprocal}
CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
# steps on pairs of 16-bit numbers
PAIRS: dict[Any, Callable[..., str]] = {
    aten.add: lambda t, a, b: f"add_pairs<{t}>({a}, {b})",
    aten.sub: lambda t, a, b: f"sub_pairs<{t}>({a}, {b})",
    aten.rsub: lambda t, a, b: f"sub_pairs<{t}>({b}, {a})",
    aten.mul: lambda t, a, b: f"mul_pairs<{t}>({a}, {b})",
    aten.neg: lambda t, a: f"({a} ^ 0x80008000u)",
    aten.clone: lambda t, a: a,
    aten._to_copy: lambda t, a: a,
}


# those of fuser/gradients.cuh
GRADIENTS = frozenset((aten.silu_backward, aten.gelu_backward))


def is_exact(e: Any) -> bool:
    """Whether a step has results of its dtype before any rounding."""
    if not isinstance(e, Step) or getattr(e.op, "overloadpacket", e.op) not in EXACT:
        return False
    return _is_of_its_dtype(e, {torch.bool, e.dtype})


def is_rounding(e: Any) -> bool:
    """Whether a step rounds where others do not."""
    return isinstance(e, Step) and e.op is rounded_step


def pairs_of(e: Step) -> Callable[..., str] | None:
    """What makes two elements of a step at once, with the bits of one by one; None if nothing."""
    packet = getattr(e.op, "overloadpacket", e.op)
    if packet not in PAIRS or dict(e.kwargs).get("alpha", 1) != 1:
        return None
    if not _is_of_its_dtype(e, {e.dtype}):
        return None
    make, kind = PAIRS[packet], type_name(e.dtype)
    return lambda *pairs: make(kind, *pairs)


def _is_of_its_dtype(e: Step, dtypes: set[torch.dtype]) -> bool:
    """Whether all operands of a step have one of `dtypes`; numbers are those of its own dtype."""
    return all(
        a.dtype in dtypes
        if isinstance(a, Lowered)
        else isinstance(a, int | float) and torch.tensor(float(a), dtype=e.dtype).item() == a
        for a in e.args
    )


def _gelu(e: Step, exact: bool) -> str:
    if dict(e.kwargs).get("approximate", "none") == "none":
        return ways.gelu_erf() if exact else "GeluErf<false>"
    if exact:
        ways.way("F.gelu tanh")
    return "GeluTanh<false>" if exact or e.dtype not in HALVES else "GeluTanh<true>"


def _gelu_backward(e: Step, exact: bool) -> str:
    if dict(e.kwargs).get("approximate", "none") == "tanh":
        return "gelu_tanh_backward"
    if exact and ways.erf() != ways.ERFS[ways.COMPILER]:
        raise Unsupported(f"{e.op} with the erf of this PyTorch")
    return "gelu_erf_backward"


def form_of_table(e: Any) -> str | None:
    """What the table of a step is made with, if there is one: `Halves` of gelu/cuda.cuh."""
    if not isinstance(e, Step) or e.op is not aten.gelu.default or e.dtype != torch.bfloat16:
        return None
    return _gelu(e, True) if e.args[0].dtype == torch.bfloat16 else None


def step_maker(e: Step, types: list[torch.dtype | None], exact: bool) -> Callable[[list[str]], str]:
    """What makes one lane of a step, not rounded yet."""
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
        return lambda a: f"float({a[0]})"
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
    if e.op in CLAMPS:
        return _clamp(e)
    if packet is aten.gelu:
        name = _gelu(e, exact)
        return lambda a: f"{name}::of({a[0]})"
    if packet is aten.gelu_backward:
        name = _gelu_backward(e, exact)
        return lambda a: f"{name}({a[0]}, {a[1]})"
    if packet is aten.pow:
        return _power(e, types, exact)
    make = None
    if exact and types[0] in HALVES:
        make = STEPS_OF_16_BITS.get(packet)
    elif not exact:
        fast = FAST_STEPS_AT_ONCE.get(packet) if e.dtype in HALVES else None
        make = fast or STEPS_AT_ONCE.get(packet)
    make = make or STEPS.get(packet)
    if make is None:
        raise Unsupported(f"{e.op} has no code here")
    if exact and packet in SUBJECTS:
        ways.way(SUBJECTS[packet])
    if packet in COMPARISONS and types[-1] is None and types[0] is not None:
        # PyTorch rounds the number to the dtype that it compares in
        border = float_literal(torch.tensor(e.args[1], dtype=types[0]).item())
        return lambda a: make(a[0], border)
    if packet is aten.div and types[-1] is None and e.args[1] != 0:
        # on a GPU PyTorch multiplies by the reciprocal of a number, rounded to float32
        inverse = torch.tensor(float(e.args[1]), dtype=torch.float32).reciprocal()
        if not inverse.isfinite():
            raise Unsupported(f"a division by {e.args[1]}")
        return lambda a: f"__fmul_rn({a[0]}, {float_literal(inverse.item())})"
    if e.dtype == torch.bool:
        return lambda a: f"({make(*a)} != 0.f ? 1.f : 0.f)"
    return lambda a: make(*a)


def _power(e: Step, types: list[torch.dtype | None], exact: bool) -> Callable[[list[str]], str]:
    """A power whose exponent is a number, by what PyTorch calls for that number on a GPU."""
    exponent = e.args[1]
    if types[0] is None or types[1] is not None:
        raise Unsupported(f"{e.op} with an exponent that is no number")
    if exponent in POWERS:
        function = Step(POWERS[exponent].default, e.args[:1], e.kwargs, e.dtype)
        make = step_maker(function, types[:1], exact)
        return lambda a: make(a[:1])
    square = ("__fmul_rn({0}, {0})" if exact else "({0} * {0})").format
    if exponent == 1:
        return lambda a: a[0]
    if exponent == 2:
        return lambda a: square(a[0])
    if exponent == 3:  # two products, each rounded to the dtype
        return lambda a: f"__fmul_rn({rounded(square(a[0]), e.dtype)}, {a[0]})"
    if types[0] != torch.float32:
        raise Unsupported(f"a power of {exponent}")
    if exponent == -2:
        return lambda a: f"__fdiv_rn(1.f, {square(a[0])})"
    return lambda a: f"powf({a[0]}, {a[1]})"


def _of_doubles(
    packet: Any, e: Step, types: list[torch.dtype | None]
) -> Callable[[list[str]], str]:
    make = STEPS_OF_DOUBLES.get(packet)
    if make is None or dict(e.kwargs).get("alpha", 1) != 1 or None in types:
        raise Unsupported(f"{e.op} of float64")
    return lambda a: make(*a)


def rounded(text: str, dtype: torch.dtype) -> str:
    """A value rounded to a dtype."""
    return f"rounded<{type_name(dtype)}>({text})" if dtype in HALVES else text

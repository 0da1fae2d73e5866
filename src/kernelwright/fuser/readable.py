"""Programs as a person reads them: what is loaded, the formula, the order of its sums."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count
from math import prod
from typing import Any

import torch
from torch import fx

from .expression import Choice, Expression, Load, Row, Step, walk
from .index import Affine
from .norms import RMS_NORMS, layer_norm_gradient, rms_norm_gradient
from .planning import Plan
from .program import Program
from .recording import Recording

aten: Any = torch.ops.aten
LONG = 60  # characters of a formula that gets a line of its own
SIGNS = {aten.add: "+", aten.sub: "-", aten.mul: "*", aten.div: "/"}
ORDERS = {
    aten.mean.dim: "at::mean's order",
    aten.sum.dim_IntList: "at::sum's order",
    aten.native_layer_norm.default: "F.layer_norm's order",
    **dict.fromkeys(RMS_NORMS, "F.rms_norm's order"),
    layer_norm_gradient: "the order of F.layer_norm's gradient",
    rms_norm_gradient: "the order of F.rms_norm's gradient",
}


def lines(plan: Plan, recording: Recording, exact: bool = True) -> Iterator[str]:
    """A plan, step by step; unless `exact` its kernels sum in any order."""
    labels = labels_of(recording)
    number = 0
    for step in plan.steps:
        if isinstance(step, fx.Node):
            given = ", ".join(labels.get(i.name, i.name) for i in step.all_input_nodes)
            yield f"{step.name} = {_name(step.target)}({given})"
        else:
            number += 1
            yield from program_lines(step, labels, f"program {number}", exact)


def program_lines(
    program: Program, labels: Mapping[str, str], title: str, exact: bool = True
) -> Iterator[str]:
    extents = dict(program.extents)
    size = " x ".join(f"{n}: {e}" for n, e in program.extents)
    sums = {
        f"; rows of {prod(extents[n] for n in r.over)} in "
        + (ORDERS.get(r.op, str(r.op)) if exact else "any order")
        for r in program.rows
    }
    yield f"{title} [{size}]{''.join(sorted(sums))}"
    uses = Counter(i for e in _all(program) for i in _operands(e))
    names: dict[Expression, str] = {}
    numbers = count()
    for e in _all(program):
        text = _written(e, names, labels)
        shared = uses[e] > 1 and not isinstance(e, Load)
        if shared or len(text) > LONG:
            names[e] = f"t{next(numbers)}"
            yield f"  {names[e]} = {text}  {_short(e.dtype)}"
        else:
            names[e] = text
    for s in program.stores:
        index = ", ".join(map(str, s.index))
        rows = ", and as rows in fp8" if s.eight else ""
        yield f"  {s.target}[{index}] = {names[s.value]}  {_short(s.dtype)}{rows}"


def _all(program: Program) -> list[Expression]:
    return list(walk(*(s.value for s in program.stores)))


def _operands(e: Expression) -> list[Any]:
    if isinstance(e, Step):
        return [a for a in e.args if isinstance(a, Expression)]
    if isinstance(e, Choice):
        return list(e.pieces)
    if isinstance(e, Row):
        return [e.x, *e.others, *(s for s in e.scales if s is not None)]
    return []


def _written(e: Expression, names: Mapping[Expression, str], labels: Mapping[str, str]) -> str:
    if isinstance(e, Load):
        return f"{labels.get(e.source, e.source)}[{', '.join(map(str, e.index))}]"
    if isinstance(e, Choice):
        parts = ", ".join(f"{i}: {names[p]}" for i, p in enumerate(e.pieces))
        return f"by {e.name} {{{parts}}}"
    if isinstance(e, Row):
        given = [names[i] for i in _operands(e)]
        given += [repr(a) for a in e.args]
        here = "" if e.at is None or e.at == _run(e) else f" at {e.at}"
        result = f", result {e.part}" if e.part else ""
        return f"{_name(e.op)}({', '.join(given)}){result}{here}"
    args = [names[a] if isinstance(a, Expression) else str(a) for a in e.args]
    packet = getattr(e.op, "overloadpacket", e.op)
    if packet in SIGNS and len(args) == 2:
        return f"({args[0]} {SIGNS[packet]} {args[1]})"
    if packet in (aten._to_copy, aten.clone):
        return f"{_short(e.dtype)}({args[0]})"
    kwargs = [f"{k}={v}" for k, v in e.kwargs]
    return f"{_name(e.op)}({', '.join([*args, *kwargs])})"


def _run(e: Row) -> Affine | None:
    """The position along the row itself, which needs no mention."""
    if len(e.over) == 1:
        return Affine(0, ((e.over[0], 1),))
    return None


def _name(op: Any) -> str:
    return getattr(op, "__name__", str(op)).partition(".")[0].removeprefix("recorded_")


def short_counts(left: Mapping[str, int]) -> dict[str, int]:
    """The ops that a plan leaves to PyTorch under short names: aten._softmax.default -> softmax.
    `getitem` takes one of several results, and is no op."""
    found: Counter[str] = Counter()
    for op, often in left.items():
        name = re.sub(r"^.*(::|\.recorded_|^aten\.|function )", "", op).removeprefix("aten.")
        name = re.sub(r"[.>].*$", "", name).removeprefix("recorded_").strip("_").replace("_", " ")
        found[name] += often
    found.pop("getitem", None)
    return dict(sorted(found.items()))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def labels_of(recording: Recording) -> dict[str, str]:
    """What the inputs of a graph are called in the module."""
    placeholders = [n.name for n in recording.graph.find_nodes(op="placeholder")]
    given = [f"input{i}" for i in range(len(placeholders) - len(recording.weights))]
    return dict(zip(placeholders, [*recording.weights, *given], strict=True))

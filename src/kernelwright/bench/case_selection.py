"""Which ops are measured at which shapes: those of presets, or given ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..close_names import suggestion
from ..errors import BadSetting
from ..ops.case import Case, Inputs
from ..ops.op import Composite, Op, registry

Chosen = tuple[Op | Composite, Case]


def choose_cases(
    names: Sequence[str], presets: Sequence[str], shapes: Sequence[str], *, small: bool
) -> list[Chosen]:
    """The cases of `presets` and `shapes`. Without either: all cases of models, and the first small
    case of a named op that has none; with `small`, only the first small case of each op."""
    ops = [_named(name) for name in names] or list(registry().values())
    for preset in presets:
        if preset not in known_presets():
            near = suggestion(preset, known_presets(), "kernelwright bench ops --help")
            raise BadSetting("--preset", f"no preset {preset!r}; {near}")
    sizes = [_size(shape) for shape in shapes]
    found = [
        (op, case)
        for op in ops
        for case in op.cases
        if case.large and (case.preset in presets or not (presets or shapes or small))
    ]
    if not presets and not shapes:
        modelled = {op.name for op, _ in found}
        found += [(op, op.cases[0]) for op in ops if small or (names and op.name not in modelled)]
    for op in ops:
        if isinstance(op, Op):
            found += [(op, _sized(op, size)) for size in sizes]
        elif sizes and names:
            raise BadSetting("--shape", f"{op.name} takes no rows and width: use --preset")
    if not found:
        has = sorted({c.preset for op in ops for c in op.cases if c.preset}) or ["none"]
        raise BadSetting(
            "--preset", f"{', '.join(names)}: not in {', '.join(presets)}; in {', '.join(has)}"
        )
    return found


def known_presets() -> tuple[str, ...]:
    """Every preset that cases name, `seed`, the example's, first."""
    found = {c.preset for op in registry().values() for c in op.cases if c.preset}
    return tuple(sorted(found, key=lambda name: (name != "seed", name)))


def _named(name: str) -> Op | Composite:
    ops = registry()
    if name not in ops:
        near = suggestion(name, ops, "kernelwright ops")
        raise BadSetting("OP", f"there is no op {name!r}; {near}")
    return ops[name]


def _size(shape: str) -> tuple[int, ...]:
    parts = shape.lower().replace("×", "x").split("x")
    if len(parts) < 2 or not all(p.isdigit() and int(p) for p in parts):
        raise BadSetting("--shape", f"{shape!r}, expected rows and width such as 2x1024x2048")
    return tuple(map(int, parts))


def _sized(op: Op, size: tuple[int, ...]) -> Case:
    """A case with the op's own arguments for this number of rows and width."""
    chain = next(iter(op.exact), "torch")

    def arguments(inputs: Inputs) -> dict[str, Any]:
        return op.sized(inputs, math.prod(size[:-1]), size[-1], chain)

    made = arguments(Inputs(torch.float32, "meta"))
    try:
        op.check(*(made[n] for n in op.arguments))
    except ValueError as wrong:
        raise BadSetting("--shape", str(wrong)) from None
    return Case(f"shape {'x'.join(map(str, size))}", arguments)

"""`kernelwright inspect NAME --programs`: the blocks of a model as programs of the fuser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from .. import models
from ..backends import Unsupported
from ..fuser import planning, readable, recording
from ..fuser.block_calls import block_calls
from ..fuser.eight_bit_rows import mark_rows
from ..fuser.launching import kernel_of, layout_of
from ..fuser.planning import Plan
from ..fuser.program import Program
from ..fuser.recording import CannotRecord
from ..fuser.rewriting import (
    split_products_of_concatenations,
    take_activations_into_products,
    take_gelu_into_products,
)
from ..inject.fp8.suitable_layers import is_short, misfit_of_shape


def shown(preset: str, tiny: bool, cuda: bool, numerics: str = "exact") -> Iterator[str]:
    """Every class of block of a preset, as text."""
    # a tiny model runs; a large one has no memory, and tells shapes alone
    how: dict[str, Any] = {"tiny": tiny, "device": "cpu" if tiny else "meta"}
    found = block_calls(models.build(preset, **how), models.inputs(preset, **how))
    for kind, (module, args, kwargs) in found.items():
        try:
            recorded = recording.record(module, args, kwargs)
        except CannotRecord as no:
            yield f"{kind}: cannot be written down: {no}"
            continue
        if numerics == "fused":
            take_gelu_into_products(recorded.graph)
            split_products_of_concatenations(recorded.graph)
        elif numerics == "fp8":
            take_activations_into_products(recorded.graph, _is_quantised)
            mark_rows(recorded.graph, _is_quantised)
        plan = planning.plan(recorded)
        programs = [s for s in plan.steps if isinstance(s, Program)]
        yield f"{kind}: {plan.ops} ops between GEMMs and attention become {len(programs)} programs"
        exact = numerics == "exact"
        yield from (f"  {line}" for line in readable.lines(plan, recorded, exact))
        if cuda:
            for number, program in enumerate(programs, 1):
                yield f"\n// {kind}, program {number}"
                yield _source(program, plan, exact)
        yield ""


def _is_quantised(layer: fx.Node) -> bool:
    """Whether a linear layer of a block would run in fp8, as far as its shape tells."""
    weight = layer.args[1].meta["val"]
    return not is_short(layer.args[0].meta["val"]) and misfit_of_shape(weight) is None


def _source(program: Program, plan: Plan, exact: bool) -> str:
    try:
        return kernel_of(program, layout_of([program], plan.values), exact).code
    except Unsupported as no:
        return f"// has no kernel yet: {no}"

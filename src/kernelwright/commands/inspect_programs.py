"""`kernelwright inspect NAME --programs`: the blocks of a model as programs of the fuser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import models
from ..backends import Unsupported
from ..fuser import cuda_source, planning, readable, recording
from ..fuser.block_calls import block_calls
from ..fuser.program import Program
from ..fuser.recording import CannotRecord, Recording


def shown(preset: str, tiny: bool, cuda: bool) -> Iterator[str]:
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
        plan = planning.plan(recorded)
        programs = [s for s in plan.steps if isinstance(s, Program)]
        yield f"{kind}: {plan.ops} ops between GEMMs and attention become {len(programs)} programs"
        yield from (f"  {line}" for line in readable.lines(plan, recorded))
        if cuda:
            for number, program in enumerate(programs, 1):
                yield f"\n// {kind}, program {number}"
                yield _source(program, recorded)
        yield ""


def _source(program: Program, recorded: Recording) -> str:
    values: dict[str, Any] = {n.name: n.meta.get("val") for n in recorded.graph.nodes}
    tensors = {n: cuda_source.Tensor(values[n].stride(), values[n].dtype) for n in program.loads}
    tensors |= {s.target: cuda_source.Tensor(s.strides, s.dtype) for s in program.stores}
    try:
        return cuda_source.kernel(program, tensors).code
    except Unsupported as no:
        return f"// has no kernel yet: {no}"

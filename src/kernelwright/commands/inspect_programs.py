"""`kernelwright inspect NAME --programs`: the blocks of a model as programs of the fuser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .. import models
from ..backends import Unsupported
from ..fuser import cuda_source, planning, readable, recording
from ..fuser.planning import Plan
from ..fuser.program import Program
from ..fuser.recording import CannotRecord, Recording

# a module in a list of its own is a block if it has more parts than this
PARTS = 5


def shown(preset: str, tiny: bool, cuda: bool) -> Iterator[str]:
    """Every class of block of a preset, as text."""
    for kind, (module, args, kwargs) in _blocks(preset, tiny).items():
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
                yield _source(program, plan, recorded)
        yield ""


def _source(program: Program, plan: Plan, recorded: Recording) -> str:
    values: dict[str, Any] = {n.name: n.meta.get("val") for n in recorded.graph.nodes}
    tensors = {n: cuda_source.Tensor(values[n].stride(), values[n].dtype) for n in program.loads}
    tensors |= {s.target: cuda_source.Tensor(s.strides, s.dtype) for s in program.stores}
    try:
        return cuda_source.kernel(program, tensors).code
    except Unsupported as no:
        return f"// has no kernel yet: {no}"


def _blocks(preset: str, tiny: bool) -> dict[str, tuple[nn.Module, Any, Any]]:
    """One block of each class, and what it is given. A tiny model runs, a large one has no memory
    and tells shapes alone."""
    how: dict[str, Any] = {"tiny": tiny, "device": "cpu" if tiny else "meta"}
    model = models.build(preset, **how)
    found: dict[str, tuple[nn.Module, Any, Any]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.setdefault(type(module).__name__, (module, args, kwargs))

    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    blocks = [b for m in lists for b in m if len(list(b.modules())) > PARTS]
    hooks = [b.register_forward_pre_hook(note, with_kwargs=True) for b in blocks]
    with torch.no_grad():
        model(**models.inputs(preset, **how))
    for hook in hooks:
        hook.remove()
    return found

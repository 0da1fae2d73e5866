"""Runs a planned graph: PyTorch's ops as they are, programs by a kernel or the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from . import interpreter
from .planning import Plan
from .program import Program
from .recording import ATTENTION, LINEAR, RMS_NORM, _attention, _rms_norm

Runner = Callable[[Program, Mapping[str, Tensor], Mapping[str, Tensor]], None]
# straight to the function, not through the dispatcher
PLAIN: dict[Any, Callable[..., Any]] = {
    LINEAR: F.linear,
    ATTENTION: _attention,
    RMS_NORM: _rms_norm,
}


def run(plan: Plan, inputs: Sequence[Tensor], programs: Runner = interpreter.run) -> list[Any]:
    """The outputs of the graph for these inputs."""
    values: dict[str, Any] = dict(plan.constants)
    for node, value in zip(plan.graph.find_nodes(op="placeholder"), inputs, strict=True):
        values[node.name] = value

    def get(node: fx.Node) -> Any:
        if node.name not in values:  # a view of something in memory
            values[node.name] = call(node)
        return values[node.name]

    def call(node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), get)
        return PLAIN.get(node.target, node.target)(*args, **kwargs)

    device = inputs[0].device
    by_name = {n.name: n for n in plan.graph.nodes}
    for step in plan.steps:
        if isinstance(step, fx.Node):
            values[step.name] = call(step)
        else:
            loaded = {name: get(by_name[name]) for name in step.loads}
            for s in step.stores:
                if s.target not in values:
                    values[s.target] = torch.empty_strided(
                        s.shape, s.strides, dtype=s.dtype, device=device
                    )
            programs(step, loaded, {s.target: values[s.target] for s in step.stores})
    (output,) = plan.graph.find_nodes(op="output")
    return [get(o) if isinstance(o, fx.Node) else o for o in output.args[0]]

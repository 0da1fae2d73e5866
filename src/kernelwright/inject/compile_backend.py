"""torch.compile(model, backend="kernelwright"): Dynamo's graphs as programs of the fuser.

Dynamo finds this backend by name, through an entry point. It hands over a graph of the functions
that a model calls, and calls what this returns with tensors for which its guards hold. The graph is
recorded with the first tensors of each layout, and compared with its own result: if bits differ, or
if it cannot be recorded, it runs as it is. So do calls of which autograd keeps a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..backends.user_warnings import warn
from ..errors import in_one_line
from .reuse.programs import MAX_RECORDINGS, Programs, Recorded
from .reuse.recordable import signature
from .runtime.sites import equal, same_strides


def kernelwright(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """The backend: a function that computes what `graph` does."""
    return _Compiled(graph)


class _Compiled:
    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._programs = Programs()
        self._known: dict[Any, Recorded | None] = {}

    def __call__(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in (*inputs, *self._graph.parameters())
        ):
            return self._graph(*inputs)
        with torch.no_grad():
            key = signature(inputs, {}), torch.is_inference_mode_enabled()
            if key not in self._known:
                return self._first(key, inputs)
            found = self._known[key]
            if found is None:
                return self._graph(*inputs)
            return self._run(found, inputs)

    def _first(self, key: Any, inputs: Any) -> Any:
        expected = self._graph(*inputs)
        if len(self._known) >= MAX_RECORDINGS:
            self._known.clear()
        self._known[key] = None
        try:
            found = self._programs.recorded(self._graph, inputs, {})
            if isinstance(found, str):
                return expected
            result = self._run(found, inputs)
        except Exception as error:
            warn(f"torch.compile: a graph stays eager: its programs failed ({in_one_line(error)})")
            return expected
        if equal(result, expected) and same_strides(result, expected):
            self._known[key] = found
        else:
            warn("torch.compile: a graph differs from eager's; it stays eager")
        return expected

    def _run(self, found: Recorded, inputs: Any) -> Any:
        return found.run(found.recording.inputs(self._graph, inputs, {}))


__all__ = ["kernelwright"]

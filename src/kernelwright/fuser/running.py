"""Runs a planned graph: PyTorch's ops as they are, programs by a kernel or the interpreter.

What to do is laid out once: each step is a function of a list of values, views are taken in one
call from the tensor they are views of, and a value is let go after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from . import interpreter
from .building import Builder
from .expression import Load
from .index import Affine, Space
from .planning import Plan
from .program import Program, Store
from .recording import (
    ATTENTION,
    LAYER,
    LINEAR,
    RMS_NORM,
    call_layer,
    plain_attention,
    plain_rms_norm,
)

# writes what a program stores: (program, what it loads by name, what it stores by name)
Runner = Callable[[Program, Mapping[str, Tensor], Mapping[str, Tensor]], None]
Values = list[Any]
# what computes a linear layer with the weight of this name: (name) -> (x, weight, bias) -> y
Products = Callable[[str], Callable[[Tensor, Tensor, Tensor | None], Tensor]]
# straight to the function, not through the dispatcher
PLAIN: dict[Any, Callable[..., Any]] = {
    LINEAR: F.linear,
    ATTENTION: plain_attention,
    LAYER: call_layer,
    RMS_NORM: plain_rms_norm,
}


class OtherShape(Exception):
    """A result whose shape depends on values has another one than when it was recorded."""


class Executable:
    """A plan, ready to be run with tensors of the shapes and strides it was recorded with."""

    def __init__(
        self, plan: Plan, programs: Runner = interpreter.run, products: Products | None = None
    ) -> None:
        self._plan, self._programs, self._products = plan, programs, products
        self._place: dict[str, int] = {}
        inputs = plan.graph.find_nodes(op="placeholder")
        self._start: Values = [None] * len(inputs)
        for node in inputs:
            self._new(node.name)
        for name, value in plan.constants.items():
            self._new(name)
            self._start.append(value)
        self._steps: list[Callable[[Values], None]] = []
        self._used: list[set[int]] = []  # by each step
        for step in plan.steps:
            self._add(self._leaf(step) if isinstance(step, fx.Node) else self._program(step))
        (output,) = plan.graph.find_nodes(op="output")
        self._outputs = [self._reader(o) for o in output.args[0]]
        self._needed: set[int] = set()
        for o in output.args[0]:
            self._needed |= self._places(o)
        self._let_go()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs of the graph for these inputs."""
        values = self._start + [None] * (len(self._place) - len(self._start))
        values[: len(inputs)] = inputs
        for step in self._steps:
            step(values)
        return [read(values) for read in self._outputs]

    def _new(self, name: str) -> int:
        return self._place.setdefault(name, len(self._place))

    def _add(self, step: tuple[Callable[[Values], None], set[int]]) -> None:
        self._steps.append(step[0])
        self._used.append(step[1])

    def _let_go(self) -> None:
        """Drop each value after the step that uses it last."""
        kept, steps = set(self._needed), []
        for step, used in zip(reversed(self._steps), reversed(self._used), strict=True):
            last = tuple(used - kept)
            kept |= used
            steps.append(_then_drop(step, last) if last else step)
        self._steps = steps[::-1]

    # what a step reads

    def _base(self, node: fx.Node) -> fx.Node:
        while node.name not in self._place:
            node = node.all_input_nodes[0]
        return node

    def _reader(self, value: Any) -> Callable[[Values], Any]:
        """What finds an argument among the values."""
        if isinstance(value, fx.Node):
            base = self._base(value)
            place = self._place[base.name]
            if base is value:
                return _value(place)
            return _view(place, value, base)
        if isinstance(value, list | tuple) and any(isinstance(v, fx.Node) for v in value):
            readers, kind = [self._reader(v) for v in value], type(value)
            return lambda values: kind([read(values) for read in readers])
        return lambda values: value

    def _places(self, value: Any) -> set[int]:
        found: set[int] = set()
        fx.node.map_arg(value, lambda n: found.add(self._place[self._base(n).name]))
        return found

    # steps

    def _leaf(self, node: fx.Node) -> tuple[Callable[[Values], None], set[int]]:
        function = PLAIN.get(node.target, node.target)
        if node.target is LINEAR and self._products is not None:
            function = self._products(node.args[1].name)
        args = [self._reader(a) for a in node.args]
        kwargs = {k: self._reader(v) for k, v in node.kwargs.items()}
        used = self._places((node.args, node.kwargs))
        place = self._new(node.name)

        def run(values: Values) -> None:
            given = [read(values) for read in args]
            values[place] = function(*given, **{k: read(values) for k, read in kwargs.items()})

        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
            return _shaped(run, place, node.meta["val"].shape), used | {place}
        return run, used | {place}

    def _program(self, program: Program) -> tuple[Callable[[Values], None], set[int]]:
        nodes = {n.name: n for n in self._plan.graph.nodes}
        # a copy in another layout is no node of the graph
        loads = {
            name: self._reader(nodes[name]) if name in nodes else _value(self._place[name])
            for name in program.loads
        }
        used = self._places([nodes[name] for name in program.loads if name in nodes])
        used |= {self._place[name] for name in program.loads if name not in nodes}
        fresh = [s for s in program.stores if s.target not in self._place]
        places = {s.target: self._new(s.target) for s in program.stores}
        runs, first = self._programs, next(iter(nodes.values())).meta["val"].device

        def run(values: Values) -> None:
            given = {name: read(values) for name, read in loads.items()}
            device = next(iter(given.values())).device if given else first
            for s in fresh:
                values[places[s.target]] = _allocated(s, device)
            runs(program, given, {name: values[place] for name, place in places.items()})

        return run, used | set(places.values())


def run(plan: Plan, inputs: Sequence[Tensor], programs: Runner = interpreter.run) -> list[Any]:
    """The outputs of a planned graph, once."""
    return Executable(plan, programs)(inputs)


def _view(place: int, node: fx.Node, base: fx.Node) -> Callable[[Values], Tensor]:
    """A view of a value, laid out as it was when the graph was recorded."""
    like, source = node.meta["val"], base.meta["val"]
    size, strides = like.shape, like.stride()
    # the graph has sizes and strides of a view, but not where it begins
    first = Builder(Space(), {base}).at(node, (Affine(),) * like.ndim)
    assert isinstance(first, Load)
    offset = sum(i.constant * s for i, s in zip(first.index, source.stride(), strict=True))

    def view(values: Values) -> Tensor:
        whole = values[place]
        return whole.as_strided(size, strides, whole.storage_offset() + offset)

    return view


def _value(place: int) -> Callable[[Values], Any]:
    return lambda values: values[place]


def _shaped(step: Callable[[Values], None], place: int, shape: Any) -> Callable[[Values], None]:
    def run(values: Values) -> None:
        step(values)
        if values[place].shape != shape:
            raise OtherShape

    return run


def _allocated(store: Store, device: torch.device) -> Tensor:
    return torch.empty_strided(store.shape, store.strides, dtype=store.dtype, device=device)


def _then_drop(step: Callable[[Values], None], places: tuple[int, ...]) -> Callable[[Values], None]:
    def run(values: Values) -> None:
        step(values)
        for place in places:
            values[place] = None

    return run

"""Runs a planned graph: PyTorch's ops as they are, programs by a kernel or the interpreter.

What to do is laid out once: each step is a function of a list of values, views are taken in one
call from the tensor they are views of, and a value is let go after its last use. On a GPU without
graphs the Python between two launches counts: constants are values too, so that one call reads all
arguments of an op, and a kernel is launched with addresses alone, without names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
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

aten: Any = torch.ops.aten
# writes what a program stores: (program, what it loads by name, what it stores by name)
Runner = Callable[[Program, Mapping[str, Tensor], Mapping[str, Tensor]], None]
Values = list[Any]
# what launches a program whose tensors have these places among the values, or None. It returns
# whether it did: otherwise the program has to be given to a `Runner`
Launchers = Callable[[Program, Mapping[str, int]], Callable[[Values], bool] | None]
# what computes a linear layer with the weight of this name: (name) -> (x, weight, bias) -> y
Products = Callable[[str], Callable[[Tensor, Tensor, Tensor | None], Tensor]]
# straight to the function, not through the dispatcher
PLAIN: dict[Any, Callable[..., Any]] = {
    LINEAR: F.linear,
    ATTENTION: plain_attention,
    LAYER: call_layer,
    RMS_NORM: plain_rms_norm,
}


# ops with a weight: an input that reaches one is an activation, and differs from block to block
PRODUCTS = (LINEAR, LAYER, aten.convolution.default)


class OtherShape(Exception):
    """A result whose shape depends on values has another one than when it was recorded."""


@dataclass(eq=False)
class _Step:
    """One op or program: a function of the list of values, and the places it reads and writes."""

    run: Callable[[Values], None]
    reads: set[int]
    writes: set[int]
    product: bool = False  # whether it multiplies by a weight
    attends: bool = False


class Executable:
    """A plan, ready to be run with tensors of the shapes and strides it was recorded with.

    Its first steps may be *early*: made of inputs that no product reads, such as a mask that all
    blocks of a model are given. `early_inputs` are their positions among the inputs.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Runner = interpreter.run,
        products: Products | None = None,
        launchers: Launchers = lambda program, places: None,
    ) -> None:
        self._plan, self._programs, self._products = plan, programs, products
        self._launchers = launchers
        self._place: dict[Any, int] = {}
        self._start: Values = []
        inputs = plan.graph.find_nodes(op="placeholder")
        for node in inputs:
            self._new(node.name)
        for name, value in plan.constants.items():
            self._start[self._new(name)] = value
        steps = [
            self._leaf(step) if isinstance(step, fx.Node) else self._program(step)
            for step in plan.steps
        ]
        (output,) = plan.graph.find_nodes(op="output")
        self._outputs = [self._reader(o) for o in output.args[0]]
        needed: set[int] = set()
        for o in output.args[0]:
            needed |= self._places(o)
        early, self.early_inputs = self._find_early(steps, len(inputs) - plan.given, len(inputs))
        late = [s for s in steps if s not in early]
        written = set().union(*(s.writes for s in early))
        self._shared = sorted(written & needed.union(*(s.reads for s in late)))
        self._early = _letting_go(early, needed | set(self._shared))
        self._late = _letting_go(late, needed | written)

    def __call__(self, inputs: Sequence[Tensor], early: Sequence[Any] | None = None) -> list[Any]:
        """The outputs of the graph for these inputs; `early` is what its early steps have made."""
        values = self._values(inputs)
        if early is None:
            _run(self._early, values)
        else:
            for place, value in zip(self._shared, early, strict=True):
                values[place] = value
        _run(self._late, values)
        return [read(values) for read in self._outputs]

    def early(self, inputs: Sequence[Tensor]) -> list[Any]:
        """What the early steps make of these inputs."""
        values = self._values(inputs)
        _run(self._early, values)
        return [values[place] for place in self._shared]

    def _values(self, inputs: Sequence[Tensor]) -> Values:
        values = self._start.copy()
        values[: len(inputs)] = inputs
        return values

    @staticmethod
    def _find_early(steps: list[_Step], first: int, last: int) -> tuple[list[_Step], list[int]]:
        """Steps that are made of inputs alone (places from `first` to `last`), of such that reach
        no product; and the places of those."""
        roots: dict[int, frozenset[int]] = {p: frozenset((p,)) for p in range(last)}
        of_step: list[frozenset[int]] = []
        flowing: set[int] = set(range(first))
        for step in steps:
            found = frozenset().union(*(roots.get(p, frozenset()) for p in step.reads))
            of_step.append(found)
            for place in step.writes:
                # what leaves an attention is an activation, whatever its mask and angles were
                roots[place] = (
                    frozenset() if step.attends else roots.get(place, frozenset()) | found
                )
            if step.product:
                flowing |= found
        if not any(step.product for step in steps):
            return [], []
        pairs = list(zip(steps, of_step, strict=True))
        early = [s for s, found in pairs if found and not found & flowing]
        # a value that is only partly early is none: what is shared must not be written to
        while True:
            others = set().union(*(s.writes for s in steps if s not in early))
            rest = [s for s in early if not (s.writes | s.reads) & others]
            if len(rest) == len(early):
                break
            early = rest
        places = set().union(*(found for s, found in pairs if s in early))
        return early, sorted(places)

    def _new(self, name: Any) -> int:
        if name not in self._place:
            self._place[name] = len(self._start)
            self._start.append(None)
        return self._place[name]

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

    def _arguments(self, args: Sequence[Any]) -> Callable[[Values], Iterable[Any]]:
        """What finds all arguments of an op among the values."""
        places = [self._place_of(a) for a in args]
        if len(args) < 2 or None in places:  # of a single place, `itemgetter` makes no tuple
            readers = [self._reader(a) for a in args]
            return lambda values: [read(values) for read in readers]
        return itemgetter(*places)

    def _place_of(self, value: Any) -> int | None:
        """The place of a value or of a constant; None for views and lists of values."""
        if isinstance(value, fx.Node):
            return self._place.get(value.name)
        if isinstance(value, list | tuple) and any(isinstance(v, fx.Node) for v in value):
            return None
        place = self._new(object())  # a name that nothing else has
        self._start[place] = value
        return place

    def _places(self, value: Any) -> set[int]:
        found: set[int] = set()
        fx.node.map_arg(value, lambda n: found.add(self._place[self._base(n).name]))
        return found

    # steps

    def _leaf(self, node: fx.Node) -> _Step:
        function = PLAIN.get(node.target, node.target)
        if node.target is LINEAR and self._products is not None:
            function = self._products(node.args[1].name)
        arguments = self._arguments(node.args)
        kwargs = {k: self._reader(v) for k, v in node.kwargs.items()}
        if not self._places(node.kwargs):  # constants, such as a dtype
            function, kwargs = partial(function, **node.kwargs) if kwargs else function, {}
        reads = self._places((node.args, node.kwargs))
        place = self._new(node.name)

        def run(values: Values) -> None:
            if kwargs:
                named = {k: read(values) for k, read in kwargs.items()}
                values[place] = function(*arguments(values), **named)
            else:
                values[place] = function(*arguments(values))

        step = _Step(run, reads, {place}, node.target in PRODUCTS, node.target is ATTENTION)
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
            step.run = _shaped(run, place, node.meta["val"].shape)
        return step

    def _program(self, program: Program) -> _Step:
        nodes = {n.name: n for n in self._plan.graph.nodes}
        # a copy in another layout is no node of the graph
        loads = {
            name: self._reader(nodes[name]) if name in nodes else _value(self._place[name])
            for name in program.loads
        }
        reads = self._places([nodes[name] for name in program.loads if name in nodes])
        reads |= {self._place[name] for name in program.loads if name not in nodes}
        fresh = [s for s in program.stores if s.target not in self._place]
        places = {s.target: self._new(s.target) for s in program.stores}
        runs, device = self._programs, next(iter(nodes.values())).meta["val"].device
        allocations = [(places[s.target], _allocation(s)) for s in fresh]
        first = min(reads, default=None)
        viewed = any(name not in self._place for name in program.loads)
        launch = None if viewed else self._launchers(program, self._place)

        def run(values: Values) -> None:
            on = device if first is None else values[first].device
            for place, allocate in allocations:
                values[place] = allocate(device=on)
            if launch is None or not launch(values):
                given = {name: read(values) for name, read in loads.items()}
                runs(program, given, {name: values[place] for name, place in places.items()})

        return _Step(run, reads, set(places.values()))


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
    return itemgetter(place)


def _shaped(step: Callable[[Values], None], place: int, shape: Any) -> Callable[[Values], None]:
    def run(values: Values) -> None:
        step(values)
        if values[place].shape != shape:
            raise OtherShape

    return run


def _allocation(store: Store) -> Callable[..., Tensor]:
    return partial(torch.empty_strided, store.shape, store.strides, dtype=store.dtype)


# what to do, and the places of the values that nothing uses after it
Steps = list[tuple[Callable[[Values], None], tuple[int, ...]]]


def _letting_go(steps: list[_Step], kept: set[int]) -> Steps:
    """Steps, each with the values that it uses last."""
    kept, found = set(kept), []
    for step in reversed(steps):
        used = step.reads | step.writes
        found.append((step.run, tuple(used - kept)))
        kept |= used
    return found[::-1]


def _run(steps: Steps, values: Values) -> None:
    for step, last in steps:
        step(values)
        for place in last:
            values[place] = None

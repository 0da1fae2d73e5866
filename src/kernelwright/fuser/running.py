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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..ops.attention import window
from ..ops.linear import algorithms, linear_gelu
from ..ops.linear.parts import linear_of_parts
from . import interpreter
from .argument_views import Layout, layout, layouts_as_read, lies_in
from .attention_by_lengths import Lengths, attend, laid_out
from .cached_attention import CACHE_UPDATE, CACHED_ATTENTION, CALLS, run_call
from .eight_bit_rows import eight_bit_rows
from .parallel_attention import PARALLEL_ATTENTION, attend_in_parallel
from .planning import Plan
from .program import Program, Store
from .recorded_ops import (
    ATTENTION,
    LAYER,
    LINEAR,
    LINEAR_GELU,
    LINEAR_OF_ACTIVATION,
    LINEAR_OF_PARTS,
    LINEARS,
    RMS_NORM,
    call_layer,
    joined_linears,
    linear_of_activation,
    plain_attention,
    plain_rms_norm,
)
from .steps_apart import Step, Values, find_early, find_prompts
from .value_places import ValuePlaces, value_at
from .views import VIEWS, packet

aten: Any = torch.ops.aten
# writes what a program stores: (program, what it loads by name, what it stores by name)
Runner = Callable[[Program, Mapping[str, Tensor], Mapping[str, Tensor]], None]
# what computes linear layers with the weights of these names: a function with the arguments and the
# result of the op LINEAR or LINEAR_OF_ACTIVATION for one name, of LINEARS for several
Products = Callable[[Sequence[str]], Callable[..., Any]]
# what a mask says: lengths, or why it is needed; None if it was not asked: (mask, queries, keys,
# whether attention can be told a window)
LengthsOf = Callable[[Tensor, int, int, bool], Lengths | str | None]
# what launches a program whose tensors have these places among the values, or None. It returns
# whether it did: otherwise the program has to be given to a `Runner`
Launchers = Callable[[Program, Mapping[str, int]], Callable[[Values], bool] | None]
# straight to the function, not through the dispatcher
PLAIN: dict[Any, Callable[..., Any]] = {
    LINEAR: F.linear,
    LINEAR_GELU: linear_gelu,
    LINEARS: joined_linears,
    LINEAR_OF_ACTIVATION: linear_of_activation,
    LINEAR_OF_PARTS: linear_of_parts,
    ATTENTION: plain_attention,
    LAYER: call_layer,
    RMS_NORM: plain_rms_norm,
    PARALLEL_ATTENTION: attend_in_parallel,
    CACHE_UPDATE: run_call,
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
}


# ops with a weight: an input that reaches one is an activation, and differs from block to block
PRODUCTS = (
    *(LINEAR, LINEAR_GELU, LINEAR_OF_ACTIVATION, LINEAR_OF_PARTS, LINEARS, LAYER),
    aten.convolution.default,
)
ATTENDS = (ATTENTION, PARALLEL_ATTENTION, *CALLS)
# what may do more than compute a result
REMEMBERS = (LAYER, *CALLS)
PRODUCTS_OF_TWO = (aten.mm.default, aten.addmm.default)


class OtherShape(Exception):
    """A result whose shape depends on values has another one than when it was recorded."""


@dataclass(eq=False)
class PromptSteps:
    """Steps that read one input of the graph and weights alone, where this input reaches the
    outputs through attention only: the keys and values of a prompt, which may be kept as long as
    neither changes."""

    source: int  # the place of the input
    weights: list[int]  # the places of the weights
    steps: list[Callable[[Values], None]]
    results: list[int]  # the places that later steps read
    start: Values

    def make(self, inputs: Sequence[Tensor | None]) -> list[Any]:
        """What the steps make of these inputs, of which they read their source and weights."""
        values = list(self.start)
        values[: len(inputs)] = inputs
        for step in self.steps:
            step(values)
        return [values[place] for place in self.results]


class Executable:
    """A plan, ready to be run with tensors of the shapes and strides it was recorded with.

    Its first steps may be *early*: made of inputs that no product reads, such as a mask that all
    blocks of a model are given. `early_inputs` are the positions of those among the inputs, and
    `early_results` names what they make. Others may be
    made of a prompt alone (`prompts`). With `lengths_of` what an early mask says is asked early as
    well, and attention runs by lengths where that is all; `lengths` are the last answers.
    `attention` computes F.scaled_dot_product_attention, in any layout.

    With `as_read` programs store their results in the shape in which most of PyTorch's ops read
    them, rows of a matrix for example: then these need no view. Nothing else may be given the
    results of its early steps or prompts.

    With `by_algorithms` large products of two matrices run by the fastest algorithm that has
    PyTorch's bits.

    `keep_rows` is given what programs store in eight bits: the tensor, its rows and their scales.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Runner = interpreter.run,
        products: Products | None = None,
        lengths_of: LengthsOf | None = None,
        launchers: Launchers = lambda program, places: None,
        attention: Callable[..., Tensor] = plain_attention,
        as_read: bool = False,
        keep_rows: Callable[[Tensor, Tensor, Tensor], None] = lambda x, rows, scale: None,
        by_algorithms: bool = False,
    ) -> None:
        self._plan, self._programs, self._products = plan, programs, products
        self._lengths_of, self._launchers = lengths_of, launchers
        self._attention, self._keep_rows = attention, keep_rows
        self._by_algorithms = by_algorithms
        self.lengths: dict[str, Lengths | str | None] = {}
        self._nodes = {n.name: n for n in plan.graph.nodes}
        self._stored = layouts_as_read(plan) if as_read else {}
        self._places = places = ValuePlaces(self._stored)
        inputs = plan.graph.find_nodes(op="placeholder")
        for node in inputs:
            places.new(node.name)
        for name, value in plan.constants.items():
            places.start[places.new(name)] = value
        (output,) = plan.graph.find_nodes(op="output")
        self._returned = {_root(o).name for o in output.args[0] if isinstance(o, fx.Node)}
        steps: list[Step] = []
        for step in plan.steps:
            if isinstance(step, Program):
                steps.append(self._program(step))
                continue
            if self._by_lengths(step):
                steps.append(self._lengths_step(step))
            steps.append(self._leaf(step))
        self._outputs = places.output_readers(output.args[0])
        needed: set[int] = set()
        for o in output.args[0]:
            needed |= places.read_by(o)
        weights = len(inputs) - plan.given
        given = range(weights, len(inputs) - plan.handed)
        of_samples = [p for p in given if getattr(inputs[p].meta.get("val"), "ndim", 2) <= 1]
        # eager makes a new tensor of numbers that stand in the forward, but returns an attribute
        numbers = {places.of[name] for name in plan.constants if _is_number(self._nodes[name])}
        held = {places.of[name] for name in plan.constants} - numbers
        every = range(len(inputs))
        early, self.early_inputs = find_early(steps, given, every, of_samples, held)
        of_prompts = find_prompts(steps, early, given, every, needed, held)
        apart = {*early, *(s for found in of_prompts.values() for s in found)}
        late = [s for s in steps if s not in apart and not s.only_early]
        later = needed.union(*(s.reads for s in late))
        written = set().union(*(s.writes for s in apart))
        self._shared = sorted(later & set().union(*(s.writes for s in early)))
        # later calls read them too: the caller of a block may write to what it returns
        self._constant_outputs = sorted(needed & numbers)
        self._early_outputs = sorted(needed & set(self._shared))
        names = {place: name for name, place in places.of.items()}
        self.early_results: list[Any] = [names[place] for place in self._shared]
        self._early = _letting_go(early, later)
        self._late = _letting_go(late, needed | written)
        self.prompts = [
            PromptSteps(
                source,
                sorted({p for s in found for p in s.reads if p < weights}),
                [s.run for s in found],
                sorted(later & set().union(*(s.writes for s in found))),
                self._values(()),
            )
            for source, found in of_prompts.items()
        ]

    def __call__(
        self,
        inputs: Sequence[Tensor],
        early: Sequence[Any] | None = None,
        kept: Sequence[Sequence[Any]] | None = None,
        once: bool = False,
    ) -> list[Any]:
        """The outputs of the graph for these inputs; `early` is what its early steps have made,
        `kept` what those of each of its prompts have. With `once` the list of inputs is emptied, so
        that they are freed after their last use."""
        values = self._values(inputs)
        if once:
            assert isinstance(inputs, list)
            assert not self.prompts
            inputs.clear()
        if early is None:
            _run(self._early, values)
        else:
            for place, value in zip(self._shared, early, strict=True):
                values[place] = value
        for i, prompt in enumerate(self.prompts):
            made = prompt.make(inputs) if kept is None else kept[i]
            for place, value in zip(prompt.results, made, strict=True):
                values[place] = value
        _run(self._late, values)
        for place in self._constant_outputs:
            values[place] = values[place].clone()
        for place in self._early_outputs if early is not None else ():
            values[place] = values[place].clone()
        return [read(values) for read in self._outputs]

    def early(self, inputs: Sequence[Tensor]) -> list[Any]:
        """What the early steps make of these inputs."""
        values = self._values(inputs)
        _run(self._early, values)
        return [values[place] for place in self._shared]

    def _values(self, inputs: Sequence[Tensor]) -> Values:
        values = self._places.start.copy()
        values[: len(inputs)] = inputs
        return values

    def _leaf(self, node: fx.Node) -> Step:
        function = PLAIN.get(node.target, node.target)
        if node.target is ATTENTION and self._attention is not plain_attention:
            function = self._laid_out(node.meta["val"])
        if node.target is CACHED_ATTENTION:
            function = _with_rows_laid_out(node.meta["val"][0])
        by_name = (LINEAR, LINEAR_OF_ACTIVATION, LINEARS)
        if node.target in by_name and self._products is not None:
            weights = node.args[1] if node.target is LINEARS else [node.args[1]]
            function = self._products([w.name for w in weights])
        args = self._of_linear(node)
        if args is None:
            args = node.args
        else:
            function = F.linear
        large = self._by_algorithms and node.target in PRODUCTS_OF_TWO and _is_large(node)
        if large and function in (F.linear, torch.mm):
            function = algorithms.CallSite(transposed=function is torch.mm)
        places = self._places
        arguments = places.arguments(args)
        kwargs = {k: places.reader(v) for k, v in node.kwargs.items()}
        if not places.read_by(node.kwargs):  # constants, such as a dtype
            function, kwargs = partial(function, **node.kwargs) if kwargs else function, {}
        reads = places.read_by((node.args, node.kwargs))
        if self._by_lengths(node):
            function = partial(attend, like=node.meta["val"], by=self._attention)
            lengths = places.of[_lengths_name(node)]
            arguments = _with(arguments, lengths)
            reads.add(lengths)
        place = places.new(node.name)

        def run(values: Values) -> None:
            if kwargs:
                named = {k: read(values) for k, read in kwargs.items()}
                values[place] = function(*arguments(values), **named)
            else:
                values[place] = function(*arguments(values))

        kind = node.target
        step = Step(run, reads, {place}, kind in PRODUCTS, kind in ATTENDS, kind in REMEMBERS)
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
            step.run = _shaped(run, place, node.meta["val"].shape)
        return step

    def _laid_out(self, like: Tensor) -> Callable[..., Tensor]:
        """Attention in the layout that it was recorded with."""
        attention = self._attention
        return lambda *args: laid_out(attention(*args), like)

    def _of_linear(self, node: fx.Node) -> tuple[Any, ...] | None:
        """The arguments of F.linear for a product with a transposed matrix, which is what that
        calls: there the transposing takes the host a tenth of the time."""
        if node.target not in PRODUCTS_OF_TWO or node.kwargs:
            return None
        *bias, x, transposed = node.args
        matrix = self._places.base(transposed)
        shape, strides = layout(matrix)
        if len(shape) != 2 or lies_in(transposed, matrix) != (shape[::-1], strides[::-1], 0):
            return None
        if any(b.meta["val"].ndim != 1 for b in bias):
            return None
        return (x, matrix, *bias)

    def _by_lengths(self, node: fx.Node) -> bool:
        """Whether to ask what the mask of an attention [batch, heads, tokens, dim] says."""
        if self._lengths_of is None or node.target is not ATTENTION:
            return False
        query, mask, causal = node.args[0], node.args[3], node.args[5]
        return isinstance(mask, fx.Node) and not causal and query.meta["val"].ndim == 4

    def _lengths_step(self, node: fx.Node) -> Step:
        query, key, value = (x.meta["val"] for x in node.args[:3])
        mask, backends = node.args[3], node.args[8]
        queries, keys = query.shape[2], key.shape[2]
        windows = not backends and window.why_not(query, key, value) is None
        read, name, ask = self._places.reader(mask), _lengths_name(node), self._lengths_of
        place = self._places.new(name)
        assert ask is not None

        def run(values: Values) -> None:
            found = self.lengths.get(name)
            if not isinstance(found, str):  # a mask that says more once will do so again
                self.lengths[name] = found = ask(read(values), queries, keys, windows)
            values[place] = found

        return Step(run, self._places.read_by(mask), {place}, only_early=True)

    def _program(self, program: Program) -> Step:
        nodes, known = self._nodes, self._places

        def reader(name: str) -> Callable[[Values], Any]:
            # a copy in another layout is no node of the graph
            return known.reader(nodes[name]) if name in nodes else value_at(known.of[name])

        loads = {name: reader(name) for name in program.loads}
        reads = known.read_by([nodes[name] for name in program.loads if name in nodes])
        reads |= {known.of[name] for name in program.loads if name not in nodes}
        fresh = [s for s in program.stores if s.target not in known.of]
        places = {s.target: known.new(s.target) for s in program.stores}
        stores = {name: reader(name) for name in places}
        runs, device = self._programs, next(iter(nodes.values())).meta["val"].device
        allocations = [
            (places[s.target], self._allocation(s, self._stored.get(s.target))) for s in fresh
        ]
        eight = eight_bit_rows(program)
        for name, shape, dtype in (part for made in eight for part in made.parts()):
            place = places[name] = known.new(name)
            allocations.append((place, partial(torch.empty, shape, dtype=dtype)))
            stores[name] = value_at(place)
        made = [(places[m.source], places[m.rows], places[m.scale]) for m in eight]
        keep = self._keep_rows
        first = min(reads, default=None)
        viewed = any(name not in known.of for name in program.loads)
        launch = None if viewed else self._launchers(program, known.of)

        def run(values: Values) -> None:
            on = device if first is None else values[first].device
            for place, allocate in allocations:
                values[place] = allocate(device=on)
            if launch is None or not launch(values):
                given = {name: read(values) for name, read in loads.items()}
                runs(program, given, {name: read(values) for name, read in stores.items()})
            for x, rows, scale in made:
                keep(values[x], values[rows], values[scale])

        return Step(run, reads, set(places.values()))

    def _allocation(self, store: Store, layout: Layout | None) -> Callable[..., Tensor]:
        shape, strides = layout or (store.shape, store.strides)
        allocate = partial(torch.empty_strided, shape, strides, dtype=store.dtype)
        # whether somebody has written to what a block returns is asked of its version, and tensors
        # made in inference mode have none
        versioned = store.target in self._returned and torch.is_inference_mode_enabled()
        return torch.inference_mode(False)(allocate) if versioned else allocate


def run(plan: Plan, inputs: Sequence[Tensor], programs: Runner = interpreter.run) -> list[Any]:
    """The outputs of a planned graph, once."""
    return Executable(plan, programs)(inputs)


def _is_large(product: fx.Node) -> bool:
    """Whether choosing an algorithm for a product of two matrices may pay off."""
    first = product.args[-2].meta["val"]
    return 2 * product.meta["val"].numel() * first.shape[-1] >= algorithms.LEAST_FLOP


def _with_rows_laid_out(like: Tensor) -> Callable[..., Any]:
    """Attention over a cache, in the layout that it was recorded with: with other lengths PyTorch
    may choose a kernel that has another one."""

    def attended(given: Sequence[Tensor], number: int) -> list[Tensor]:
        rows, *weights = run_call(given, number)
        return [laid_out(rows, like), *weights]

    return attended


def _is_number(constant: fx.Node) -> bool:
    return any(user.target is aten.lift_fresh_copy.default for user in constant.users)


def _lengths_name(attention: fx.Node) -> str:
    return f"lengths of {attention.name}"


def _with(
    arguments: Callable[[Values], Iterable[Any]], place: int
) -> Callable[[Values], Iterable[Any]]:
    return lambda values: (*arguments(values), values[place])


def _shaped(step: Callable[[Values], None], place: int, shape: Any) -> Callable[[Values], None]:
    def run(values: Values) -> None:
        step(values)
        if values[place].shape != shape:
            raise OtherShape

    return run


def _root(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while packet(node) in VIEWS:
        node = node.args[0]
    return node


# what to do, and the places of the values that nothing uses after it
Steps = list[tuple[Callable[[Values], None], tuple[int, ...]]]


def _letting_go(steps: list[Step], kept: set[int]) -> Steps:
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

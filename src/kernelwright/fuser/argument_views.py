"""How arguments of ops lie in the tensors that they are views of, and how to take them there.

A view is taken in one call from the tensor in memory, however many views of views were recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod

from torch import Tensor, fx

from .building import Builder
from .expression import Load
from .index import Affine, Space
from .planning import Plan
from .program import Program
from .steps_apart import Values

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides


def layout(node: fx.Node) -> Layout:
    value = node.meta["val"]
    return tuple(value.shape), tuple(value.stride())


def lies_in(node: fx.Node, base: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Sizes and strides of a view when the graph was recorded, and where in its base it begins."""
    size, strides = layout(node)
    # the graph has sizes and strides of a view, but not where it begins
    first = Builder(Space(), {base}).at(node, (Affine(),) * len(size))
    assert isinstance(first, Load)
    _, steps = layout(base)
    offset = sum(i.constant * s for i, s in zip(first.index, steps, strict=True))
    return size, strides, offset


def view(
    place: int, size: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Callable[[Values], Tensor]:
    """A view of a value."""
    if offset == 0:
        return lambda values: values[place].as_strided(size, strides)

    def shifted(values: Values) -> Tensor:
        whole = values[place]
        return whole.as_strided(size, strides, whole.storage_offset() + offset)

    return shifted


def layouts_as_read(plan: Plan) -> dict[str, Layout]:
    """How tensors that programs store are read by most of PyTorch's ops and outputs of the graph,
    where that is another layout of the same memory than the recorded one."""
    nodes = {node.name: node for node in plan.graph.nodes}
    stored = {s.target: s for p in plan.steps if isinstance(p, Program) for s in p.stores}
    ops = [step for step in plan.steps if isinstance(step, fx.Node)]
    in_memory = {*stored, *plan.constants, *(node.name for node in ops)}
    readings: dict[str, Counter[tuple[Layout, int]]] = {name: Counter() for name in stored}

    def count(node: fx.Node) -> None:
        base = node
        while base.name not in in_memory and base.op != "placeholder":
            base = base.all_input_nodes[0]
        if base.name in stored:
            size, strides, offset = lies_in(node, base)
            readings[base.name][(size, strides), offset] += 1

    for op in (*ops, *plan.graph.find_nodes(op="output")):
        fx.node.map_arg((op.args, op.kwargs), count)
    found = {}
    for name, store in stored.items():
        if name not in nodes or layout(nodes[name]) != (store.shape, store.strides):
            continue
        best = max(readings[name].items(), key=lambda reading: reading[1], default=None)
        if best is None or best[1] <= readings[name][(store.shape, store.strides), 0]:
            continue
        (size, strides), offset = best[0]
        same = offset == 0 and prod(size) == prod(store.shape)
        if same and _is_dense(size, strides) and _is_dense(store.shape, store.strides):
            found[name] = size, strides
    return found


def _is_dense(size: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor fills its memory without gaps and overlaps, in any order of dimensions."""
    expected = 1
    for stride, n in sorted((s, n) for n, s in zip(size, strides, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True

"""The first steps of a block as the last ones of the block before it.

A block ends by adding to its hidden states, and the next one begins by normalising them. In one
graph the planner makes one program of both. The first steps of a block, its *head*, are those that
need of the block before only what programs can make on their way: no product or attention lies
between. What else they need, such as a modulation, is made of inputs that both blocks are given.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..backends.torch_internals import pytree
from . import planning
from .building import Builder
from .cached_attention import CALLS
from .expression import Load
from .index import Affine, Space
from .parallel_attention import PARALLEL_ATTENTION
from .planning import Plan
from .program import Program
from .recorded_ops import ATTENTION, LAYER
from .recording import Recording
from .running import Executable
from .views import aten, is_tensor, packet, shape_of

SPLITS = (aten.split, aten.split_with_sizes)
# what a block never does ahead: these call what belongs to the block itself, or take long
OWN = (ATTENTION, PARALLEL_ATTENTION, LAYER, *CALLS)


@dataclass(frozen=True)
class Head:
    """The first steps of a block."""

    handed: tuple[str, ...]  # the nodes whose results later steps of the block need
    weights: tuple[int, ...]  # what it reads, as places among the inputs of the block
    given: tuple[int, ...]


# for each input of a block that is no weight: its place in the results and then the inputs of the
# block before it; None if it is none of these
Sources = tuple[int | None, ...]


def head_of(block: Recording, plan: Plan, sources: Sources, results: int) -> Head | None:
    """The head of a block if it is given what `sources` say, of which the first `results` are
    results of the block before it; None if there is none."""
    inputs = block.graph.find_nodes(op="placeholder")
    own = inputs[: len(block.weights)]
    leaves = {step for step in plan.steps if isinstance(step, fx.Node)}
    stored = {s.target for step in plan.steps if isinstance(step, Program) for s in step.stores}
    ahead: set[fx.Node] = set(own)  # what can be made before the block before it ends
    after: set[fx.Node] = set()  # what its results are needed for
    for node, source in zip(inputs[len(own) :], sources, strict=True):
        if source is not None:
            (after if source < results else ahead).add(node)
    for node in block.graph.nodes:
        if node.op == "get_attr" and _is_written_in_code(node):
            ahead.add(node)
        if node.op != "call_function" or node.target in OWN:
            continue
        made_of = set(node.all_input_nodes)
        if made_of <= ahead:
            ahead.add(node)
        elif made_of <= ahead | after and node not in leaves:
            after.add(node)
    border = [n for n in block.graph.nodes if n in after and n.name in stored]
    if not border:
        return None
    needed = _made_of(border)
    # all parts of a product that has several results
    needed |= {u for n in needed & leaves for u in n.users if u.target is operator.getitem}
    products = {n for n in needed & leaves if is_tensor(n)}
    (output,) = block.graph.find_nodes(op="output")
    still_needed = _made_of([output], {*border, *products})
    handed = [n.name for n in block.graph.nodes if n in border or n in products & still_needed]
    places = [i for i, n in enumerate(inputs) if n in needed]
    count = len(own)
    weights, given = [i for i in places if i < count], [i for i in places if i >= count]
    return Head(tuple(handed), tuple(weights), tuple(given))


def rest_of(block: Recording, head: Head) -> Recording:
    """A block without its head, whose results are further inputs."""
    graph, made = fx.Graph(), {}
    for node in block.graph.find_nodes(op="placeholder"):
        made[node] = graph.node_copy(node)
    handed = [n for n in block.graph.nodes if n.name in head.handed]
    for node in sorted(handed, key=lambda n: head.handed.index(n.name)):
        made[node] = _input(graph, node)
    _copy(block.graph, graph, made)
    graph.eliminate_dead_code()
    paths = (*block.paths, *(() for _ in handed))
    left = {n.name for n in graph.find_nodes(op="get_attr")}
    constants = {name: t for name, t in block.constants.items() if name in left}
    return replace(block, graph=graph, paths=paths, constants=constants, handed=len(handed))


def head_alone(block: Recording, head: Head) -> Recording:
    """The head of a block: its inputs are the weights and then the inputs that it reads."""
    graph, made = fx.Graph(), {}
    inputs = block.graph.find_nodes(op="placeholder")
    for i in (*head.weights, *head.given):
        made[inputs[i]] = graph.node_copy(inputs[i])
    by_name = {n.name: n for n in block.graph.nodes}
    handed = [by_name[name] for name in head.handed]
    needed = _made_of(handed)
    for node in block.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output([made[node] for node in handed])
    names = {n.name for n in needed}
    return replace(
        block,
        graph=graph,
        weights=tuple(block.weights[i] for i in head.weights),
        paths=((),) * len(head.given),
        returns=pytree.tree_structure((0,) * len(handed)),
        constants={name: t for name, t in block.constants.items() if name in names},
    )


def by_ops(recording: Recording) -> Executable:
    """A recording with each op by PyTorch."""
    return Executable(planning.plan(recording, lambda program, values: "run op by op"))


@dataclass(frozen=True)
class Joined:
    """A block with the head of the next one. Its inputs are the block's weights, those of the head,
    and what the block is given; its results are the block's, then those of the head."""

    recording: Recording
    results: int  # how many of them are the block's
    weights: tuple[str, ...]  # what the weights of the head are called


def joined(block: Recording, after: Recording, head: Head, sources: Sources) -> Joined:
    graph, made = fx.Graph(), {}
    inputs, theirs = ([*r.graph.find_nodes(op="placeholder")] for r in (block, after))
    count = len(block.weights)
    for node in inputs[:count]:
        made[node] = graph.node_copy(node)
    names = [_input(graph, theirs[i]) for i in head.weights]
    of_head: dict[fx.Node, fx.Node] = {
        theirs[i]: new for i, new in zip(head.weights, names, strict=True)
    }
    for node in inputs[count:]:
        made[node] = graph.node_copy(node)
    results = _copy(block.graph, graph, made, output=False)
    constants = dict(block.constants)
    known = [*results, *(made[n] for n in inputs[count:])]
    for i in head.given:
        source = sources[i - len(after.weights)]
        assert source is not None
        of_head[theirs[i]] = known[source]
    handed = {n.name: n for n in after.graph.nodes if n.name in head.handed}
    needed = _made_of(handed.values())
    for node in after.graph.nodes:
        if node in needed and node not in of_head:
            new = graph.node_copy(node, of_head.__getitem__)
            if node.op == "get_attr":
                constants[new.name] = after.constants[node.name]
            if (whole := _taken_apart(new)) is not None:
                graph.erase_node(new)
                new = whole
            of_head[node] = new
    graph.output([*results, *(of_head[handed[name]] for name in head.handed)])
    made_names = tuple(n.name for n in names)
    total = len(results) + len(head.handed)
    recording = replace(
        block,
        graph=graph,
        weights=(*block.weights, *(after.weights[i] for i in head.weights)),
        returns=pytree.tree_structure((0,) * total),
        constants=constants,
    )
    return Joined(recording, len(results), made_names)


def _taken_apart(node: fx.Node) -> fx.Node | None:
    """The tensor whose parts, all of them and in order, a node puts together again: a block may
    return text and image apart that the next one joins."""
    if node.target is not aten.cat.default:
        return None
    parts, dim = (*node.args, 0)[:2]
    whole = _source(parts[0])
    if whole is None or shape_of(whole) != shape_of(node):
        return None
    if whole.meta["val"].stride() != node.meta["val"].stride():
        return None
    dim, start = dim % len(shape_of(node)), 0
    for part in parts:
        if _source(part) is not whole:
            return None
        index = (Affine(),) * len(shape_of(node))
        at = Builder(Space(), {whole}).at(part, index)
        assert isinstance(at, Load)
        begin = [i.constant for i in at.index]
        size = [n for i, n in enumerate(shape_of(part)) if i != dim]
        others = [n for i, n in enumerate(shape_of(node)) if i != dim]
        if begin.pop(dim) != start or any(begin) or size != others:
            return None
        start += shape_of(part)[dim]
    return whole


def _source(part: fx.Node) -> fx.Node | None:
    """What a node is a slice, or one of several parts, of."""
    if packet(part) is aten.slice:
        step = part.args[4] if len(part.args) > 4 else 1
        return part.args[0] if step == 1 else None
    if part.target is operator.getitem and packet(part.args[0]) in SPLITS:
        return part.args[0].args[0]
    return None


def _is_written_in_code(constant: fx.Node) -> bool:
    """Whether a constant is a number of the forward, not a tensor that somebody may write to."""
    return all(user.target is aten.lift_fresh_copy.default for user in constant.users)


def _made_of(nodes: Iterable[fx.Node], known: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Nodes and all that they are made of, up to those that are known."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [] if node in known else node.all_input_nodes
    return found


def _input(graph: fx.Graph, like: fx.Node) -> fx.Node:
    node = graph.placeholder(like.name)
    node.meta["val"] = like.meta["val"]
    return node


def _copy(
    source: fx.Graph, into: fx.Graph, made: dict[fx.Node, fx.Node], output: bool = True
) -> Sequence[Any]:
    """Copy the nodes that are not `made` yet; what the graph returns."""
    results: Sequence[Any] = ()
    for node in source.nodes:
        if node.op == "output":
            results = fx.node.map_arg(node.args[0], made.__getitem__)
        elif node not in made:
            made[node] = into.node_copy(node, made.__getitem__)
    if output:
        into.output(results)
    return results

"""Parting a joint graph into a forward and a backward, with as little as possible kept between.

What the backward reads of the forward is either kept or computed again. GEMMs, attention and sums
are never computed again; elementwise ops and views may be, since they give the same bits. So may
norms, which read their rows again: not for the sake of their statistics, which are small, but
instead of keeping the rows that they make. The choice with the fewest bytes is a minimum cut.
Inputs cost nothing: they are held until the backward in any case. Keeping what autograd keeps is
one of the choices, so beside the inputs never more is kept than that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ..backends.torch_internals import pytree
from .building import REDUCTIONS
from .index import CannotIndex
from .joint_recording import Joint
from .node_kinds import NodeKinds
from .recording import Recording
from .views import aten, is_tensor, packet

# ops that make a tensor of nothing
FILLED = frozenset(
    getattr(aten, name)
    for name in ("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full", "full_like")
)


@dataclass
class Parted:
    """A forward and a backward, and what goes from one to the other."""

    forward: Recording  # its outputs: results, then what is kept and not given
    backward: Recording  # its inputs: what is kept, then gradients; its outputs: contributions
    results: list[int]  # numbers of the results that the forward makes
    given: list[int]  # numbers of the inputs that are kept
    made: int  # how many of the forward's outputs, the last ones, are kept


def part(joint: Joint) -> Parted:
    graph = joint.graph
    kinds = NodeKinds(graph)
    (output,) = graph.find_nodes(op="output")
    outputs = list(output.args[0])
    inputs = graph.find_nodes(op="placeholder")
    given = inputs[: len(inputs) - len(joint.used)]
    late = _after(graph, inputs[len(given) :])
    results = [i for i in range(joint.results) if i not in joint.handed_on]
    for i in results:
        if kinds.base[outputs[i]] in inputs:
            raise CannotIndex("a result that is a view of an input")
    contributions = outputs[joint.results :]
    needed = {i for n in late for i in n.all_input_nodes if i not in late}
    needed |= {n for n in contributions if n not in late}
    kept = _cut(graph, kinds, late, needed, given)
    places = {n: i for i, n in enumerate(given)}
    held = [n for n in kept if n in places]
    made = [n for n in kept if n not in places]
    forward = _copied(graph, given, [*(outputs[i] for i in results), *made])
    backward = _copied(graph, [*held, *made, *inputs[len(given) :]], contributions)
    return Parted(
        _recording(joint, forward),
        _recording(joint, backward),
        results,
        [places[n] for n in held],
        len(made),
    )


def _after(graph: fx.Graph, starts: Collection[fx.Node]) -> set[fx.Node]:
    """All nodes that are made of these, and themselves."""
    found = set(starts)
    for node in graph.nodes:
        if node.op == "call_function" and any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _cut(
    graph: fx.Graph,
    kinds: NodeKinds,
    late: set[fx.Node],
    needed: set[fx.Node],
    given: Collection[fx.Node],
) -> list[fx.Node]:
    """The nodes to keep, in the order of the graph."""
    early = [n for n in graph.nodes if n not in late and n.op not in ("output", "get_attr")]
    flow = _Flow()
    for n in early:
        flow.edge((n, 0), (n, 1), 0 if n in given else _cost(n, kinds))
        if n in kinds.norms:  # more than its statistics take, and less than its rows
            flow.edge("source", (n, 0), _bytes(n.meta["val"][0]) // 2)
        elif not _cheap(n, kinds):
            flow.edge("source", (n, 0), None)
        if n in needed:
            flow.edge((n, 1), "sink", None)
        for user in n.users:
            if user not in late and user.op == "call_function":
                flow.edge((n, 1), (user, 0), None)
    behind = flow.behind_the_cut()
    return [n for n in early if (n, 1) in behind and (n, 0) not in behind]


def _cheap(node: fx.Node, kinds: NodeKinds) -> bool:
    """Whether a node may be computed again."""
    if node in kinds.views or packet(node) in FILLED:
        return True
    return node in kinds.computed and packet(node) not in REDUCTIONS


def _cost(node: fx.Node, kinds: NodeKinds) -> int | None:
    """How many bytes a node takes, None if it cannot be kept by itself."""
    if node in kinds.views or not is_tensor(node):
        return None
    return _bytes(node.meta["val"])


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


class _Flow:
    """A network in which the largest flow is looked for; a capacity of None is unlimited."""

    def __init__(self) -> None:
        self.left: dict[Any, dict[Any, float]] = {"source": {}, "sink": {}}

    def edge(self, a: Any, b: Any, capacity: int | None) -> None:
        amount = float("inf") if capacity is None else float(capacity)
        self.left.setdefault(a, {})[b] = amount
        self.left.setdefault(b, {}).setdefault(a, 0.0)

    def behind_the_cut(self) -> set[Any]:
        """What still reaches the sink when the flow is at its largest: of several smallest cuts,
        the one with the least to compute again."""
        while path := self._path():
            amount = min(self.left[a][b] for a, b in path)
            if amount == float("inf"):
                raise CannotIndex("a value that can neither be kept nor computed again")
            for a, b in path:
                self.left[a][b] -= amount
                self.left[b][a] += amount
        found, pending = {"sink"}, ["sink"]
        while pending:
            b = pending.pop()
            for a in self.left[b]:
                if a not in found and self.left[a][b] > 0:
                    found.add(a)
                    pending.append(a)
        return found

    def _path(self) -> list[tuple[Any, Any]]:
        before: dict[Any, Any] = {"source": None}
        pending = deque(["source"])
        while pending:
            a: Any = pending.popleft()
            for b, amount in self.left[a].items():
                if amount > 0 and b not in before:
                    before[b] = a
                    if b == "sink":
                        path = []
                        while before[b] is not None:
                            path.append((before[b], b))
                            b = before[b]
                        return path
                    pending.append(b)
        return []


def _copied(graph: fx.Graph, inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.Graph:
    """The part of a graph that leads from these inputs to these outputs."""
    found: set[fx.Node] = set()
    pending = list(outputs)
    while pending:
        n = pending.pop()
        if n not in found:
            found.add(n)
            if n not in inputs:
                pending += n.all_input_nodes
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for n in inputs:
        copies[n] = made.placeholder(n.name)
        copies[n].meta["val"] = n.meta["val"]
    for n in graph.nodes:
        if n in found and n not in copies:
            copies[n] = made.node_copy(n, lambda i: copies[i])
            assert copies[n].name == n.name
    made.output([copies[n] for n in outputs])
    return made


def _recording(joint: Joint, graph: fx.Graph) -> Recording:
    (output,) = graph.find_nodes(op="output")
    constants = {n.name: joint.constants[n.name] for n in graph.find_nodes(op="get_attr")}
    returns = pytree.tree_structure([0] * len(output.args[0]))
    return Recording(graph, (), (), returns, constants)

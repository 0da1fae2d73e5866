"""Which stored nodes of a recorded graph are one program."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod

from torch import fx

from .building import REDUCTIONS
from .node_kinds import NodeKinds
from .recorded_ops import LINEARS
from .views import is_tensor, packet, shape_of

# an operand with this many times fewer elements is computed again wherever it is used
SMALL = 16


@dataclass(frozen=True)
class MadeOf:
    """What nodes are made of, up to what is in memory; `stored` may grow."""

    kinds: NodeKinds
    stored: set[fx.Node]

    def inlined(self, node: fx.Node) -> set[fx.Node]:
        """The computed nodes that a node is made of, up to those in memory."""
        found: set[fx.Node] = set()
        pending = [node]
        while pending:
            n = pending.pop()
            if n in found:
                continue
            found.add(n)
            for i in n.all_input_nodes:
                if not self.in_memory(i):
                    pending.append(i)
        return found

    def in_memory(self, node: fx.Node) -> bool:
        """Whether programs load a node: it is stored, an input, or what PyTorch's ops made."""
        if node in self.kinds.views or node in self.kinds.norms:
            return False
        return node not in self.kinds.computed or node in self.stored

    def sources(self, node: fx.Node) -> set[fx.Node]:
        """What is in memory of all that a node is made of."""
        return {i for n in self.inlined(node) for i in n.all_input_nodes if self.in_memory(i)}


@dataclass(eq=False)
class Group:
    """Stored nodes of one program, what they are made of, and the programs that it needs first.
    `guests` are there to share what is loaded: they may have a program of their own."""

    nodes: list[fx.Node]
    made_of: set[fx.Node]
    shape: tuple[int, ...]  # of what it stores, or of the rows that have one value each
    after: list[Group] = field(default_factory=list)
    guests: set[fx.Node] = field(default_factory=set)

    def waits_for(self, other: Group) -> bool:
        pending, seen = [self], set()
        while pending:
            group = pending.pop()
            if group is other:
                return True
            if group not in seen:
                seen.add(group)
                pending += group.after
        return False


@dataclass(frozen=True)
class Grouping:
    """Groups the stored nodes of a graph. `stage` is the number of PyTorch's ops on the longest way
    to a node; those that are `apart` are no guests of another program."""

    graph: fx.Graph
    kinds: NodeKinds
    stage: Mapping[fx.Node, int]
    made_of: MadeOf
    apart: Collection[fx.Node]

    def groups(self) -> list[Group]:
        """Stored nodes that are one program: of one stage and shape, and made of the same. What is
        one value a row, such as the statistics of a norm, goes with the elements of these rows."""
        groups: list[Group] = []
        of: dict[fx.Node, Group] = {}
        for n in self.graph.nodes:
            if n not in self.made_of.stored:
                continue
            sources = self.made_of.sources(n)
            inlined, direct = self.made_of.inlined(n) | sources, sources & self.made_of.stored
            shape = self._of_rows(n) or shape_of(n)
            large = {m for m in inlined if prod(shape_of_any(m)) * SMALL >= prod(shape)}
            # query, key and value are parts of one product: one launch, and tables are read once
            large |= {i for s in sources for i in s.all_input_nodes if i.target is LINEARS}
            for group in groups:
                if self.stage[group.nodes[0]] != self.stage[n] or group.shape != shape:
                    continue
                if not (large & group.made_of or direct & set(group.nodes)):
                    continue
                # what it is made of must not wait for this very program
                if any(of[d].waits_for(group) for d in direct - set(group.nodes)):
                    continue
                group.nodes.append(n)
                group.made_of |= large
                break
            else:
                group = Group([n], large, shape)
                groups.append(group)
            of[n] = group
            group.after += [of[d] for d in direct if of[d] is not group]
        self._delay(groups)
        for group in groups:
            if all(map(self._of_rows, group.nodes)):  # nothing is stored along the rows
                group.shape = shape_of(group.nodes[0])
            group.guests |= {n for n in group.nodes if shape_of(n) != group.shape}
        return groups

    def _delay(self, groups: list[Group]) -> None:
        """Move what only results of the graph are made of, by ops of PyTorch's, to a later program
        that reads the same: an activation that is computed again for the gradient of a weight to
        the program that computes the activation's own gradient."""
        for early in list(groups):
            if not all(map(self._may_wait, early.nodes)):
                continue
            sources = set().union(*map(self.made_of.sources, early.nodes))
            size = prod(early.shape)
            large = {s for s in sources if prod(shape_of_any(s)) * SMALL >= size}
            for late in groups:
                if late.shape != early.shape or late is early:
                    continue
                if self.stage[late.nodes[0]] <= self.stage[early.nodes[0]]:
                    continue
                if large <= set().union(*map(self.made_of.sources, late.nodes)):
                    late.nodes += early.nodes
                    late.guests.update(early.nodes)
                    late.made_of |= early.made_of
                    late.after += early.after
                    groups.remove(early)
                    break

    def _may_wait(self, node: fx.Node) -> bool:
        """Whether nothing that the graph computes is made of what PyTorch's ops make of a node."""
        readers = self._readers(node)
        return node not in self.apart and all(
            r in self.kinds.leaves and {n.op for n in self._readers(r)} == {"output"}
            for r in readers
        )

    def _readers(self, node: fx.Node) -> set[fx.Node]:
        """What reads a node, or a view of it."""
        found: set[fx.Node] = set()
        for user in node.users:
            found |= self._readers(user) if user in self.kinds.views else {user}
        return found

    def _of_rows(self, node: fx.Node) -> tuple[int, ...] | None:
        """The shape of the rows of which a node has one value each, or None."""
        shape = shape_of(node)
        if node in self.apart or shape[-1:] != (1,):
            return None
        found = {
            shape_of(i)
            for n in self.made_of.inlined(node)
            if packet(n) in REDUCTIONS or n in self.kinds.norms
            for i in n.all_input_nodes[:1]
        }
        if len(found) != 1:
            return None
        (rows,) = found
        return rows if rows[:-1] == shape[:-1] and rows[-1] >= SMALL else None


def shape_of_any(node: fx.Node) -> tuple[int, ...]:
    return shape_of(node) if is_tensor(node) else ()

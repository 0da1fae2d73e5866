"""Orders of summation as trees: which elements of a row meet first.

A leaf is an element; every other node adds two. The trees are those of the kernels in
ops/row/norms.cuh, where threads fold the elements they hold, and halve what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..backends import Unsupported
from ..ops import ways
from ..ops.row.order import mean_order, quack_order


@dataclass
class Tree:
    """Nodes are numbered: the leaves first, then every addition after what it adds."""

    leaves: int
    added: list[tuple[int, int]] = field(default_factory=list)

    def add(self, a: int | None, b: int | None) -> int | None:
        """The sum of two nodes; None is nothing, not zero."""
        if a is None or b is None:
            return b if a is None else a
        self.added.append((a, b))
        return self.leaves + len(self.added) - 1

    def fold(self, nodes: Sequence[int | None]) -> int | None:
        """One after the other."""
        total = None
        for node in nodes:
            total = self.add(total, node)
        return total

    def halve(self, nodes: Sequence[int | None]) -> int | None:
        """Each of the first half with its partner in the second, until one is left."""
        nodes = list(nodes)
        while len(nodes) > 1:
            half = len(nodes) // 2
            nodes = [self.add(nodes[i], nodes[i + half]) for i in range(half)]
        return nodes[0]

    def parents(self) -> list[int]:
        """The node that each node is added to; -1 for the root."""
        found = [-1] * (self.leaves + len(self.added))
        for number, pair in enumerate(self.added, self.leaves):
            for node in pair:
                found[node] = number
        return found

    def meet_first(self, triples: Sequence[tuple[int, int, int]]) -> list[bool]:
        """Of elements (i, j, k): whether i and j are added before either has met k."""
        parents = self.parents()

        def ways_up(node: int) -> list[int]:
            path = [node]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            return path

        found = []
        for i, j, k in triples:
            above_j, above_k = set(ways_up(j)), set(ways_up(k))
            meeting = next(node for node in ways_up(i) if node in above_j)
            found.append(meeting not in above_k)
        return found

    def sum(self, terms: Tensor, squares_of: Tensor | None = None) -> Tensor:
        """The sum of every row of float32 terms. If the values are given whose squares the terms
        are, a product is added without being rounded, as by fma."""
        columns: list[Tensor] = list(terms.unbind(-1))
        values = None if squares_of is None else squares_of.unbind(-1)
        for a, b in self.added:
            if values is not None and b < self.leaves:
                product = values[b].double().square()
                columns.append((columns[a].double() + product).float())
            else:
                columns.append(columns[a] + columns[b])
        return columns[-1]


def tree_of(subject: str, way: str, width: int, rows: int, itemsize: int) -> Tree | None:
    """The tree of a subject's sum; None if it is no plain sum, or of a size without a kernel."""
    try:
        if subject == "at::mean":
            return mean_tree(width, rows)
        if subject == "F.rms_norm" and way == ways.QUACK:
            order = quack_order(width, itemsize)
            return vectors_tree(width, order.threads, order.vector)
        if subject == "F.rms_norm" and width % 4 == 0:
            return vectors_tree(width, 128, 4)
    except Unsupported:
        pass
    return None


def vectors_tree(width: int, threads: int, vector: int) -> Tree:
    """One accumulator a thread; thread t takes the vectors t, t + threads, ..."""
    tree = Tree(width)
    held = [_held(t, threads, vector, width) for t in range(threads)]
    sums = [tree.fold(elements) for elements in held]
    warps = [tree.halve(sums[w : w + 32]) for w in range(0, threads, 32)]
    tree.halve(warps)
    return tree


def mean_tree(width: int, rows: int) -> Tree:
    """at::mean: four accumulators a thread, one for each lane of its vectors."""
    order = mean_order(width, rows, room=1)
    vector = 4 if width >= 128 else 1
    tree = Tree(width)
    sums = []
    for t in range(order.block):
        held = _held(t, order.block, vector, width)
        lanes = [tree.fold(held[lane::4]) for lane in range(4)]
        sums.append(tree.fold(lanes))
    tree.halve(sums)
    return tree


def _held(thread: int, threads: int, vector: int, width: int) -> list[int]:
    return [v * vector + i for v in range(thread, width // vector, threads) for i in range(vector)]


def reversed_tree(width: int) -> Tree:
    """From the last element to the first: an order that no PyTorch has had."""
    tree = Tree(width)
    tree.fold(list(range(width))[::-1])
    return tree

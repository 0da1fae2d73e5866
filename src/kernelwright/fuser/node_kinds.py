"""What each node of a recorded graph is: computed here, a view, or left to PyTorch."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from .building import IN_PLACE, MOVES, REDUCTIONS, STEPS, is_known_padding
from .norms import can_be_computed, is_getitem
from .recorded_ops import RMS_NORM
from .views import PARTS, VIEWS, aten, is_tensor, packet, shape_of


class NodeKinds:
    """What each node of a graph is; those in `left` stay PyTorch's."""

    def __init__(self, graph: fx.Graph, left: Collection[fx.Node] = ()) -> None:
        self.left = left
        self.nodes = [n for n in graph.nodes if n.op == "call_function"]
        self.norms = {n for n in self.nodes if self._is_norm(n)}
        self.computed = {n for n in self.nodes if self._is_computed(n)}
        self.views = {n for n in self.nodes if self._is_view(n)}
        inside = self.computed | self.views | self.norms
        self.leaves = [n for n in self.nodes if n not in inside]
        self.base: dict[fx.Node, fx.Node] = {}
        for n in graph.nodes:
            source = n.all_input_nodes[0] if n in self.views else n
            self.base[n] = self.base.get(source, source) if n in self.views else n

    def _is_computed(self, node: fx.Node) -> bool:
        kind = packet(node)
        if node in self.left or len(_devices(node)) > 1 or _is_lazy(node):
            return False
        if node.target is RMS_NORM:
            return len(node.args[1]) == 1
        if kind in IN_PLACE:
            first = node.args[0]
            return isinstance(first, fx.Node) and len(first.users) == 1 and _is_fresh(first)
        if kind in REDUCTIONS:
            return _along_last(node)
        if kind is aten.constant_pad_nd:
            return is_known_padding(node)
        if is_getitem(node):
            return node.args[0] in self.norms
        return (kind in STEPS or kind in MOVES) and is_tensor(node)

    def _is_norm(self, node: fx.Node) -> bool:
        """A norm with several results, or a gradient of one. If one of its results stays PyTorch's,
        all of them do."""
        if node in self.left or any(user in self.left for user in node.users):
            return False
        return len(_devices(node)) == 1 and can_be_computed(node)

    def _is_view(self, node: fx.Node) -> bool:
        if is_getitem(node):
            return packet(node.args[0]) in PARTS
        return packet(node) in VIEWS or packet(node) in PARTS


def _is_fresh(node: fx.Node) -> bool:
    return node.op == "call_function" and packet(node) not in VIEWS and not is_getitem(node)


def _along_last(node: fx.Node) -> bool:
    x, dims = (*node.args, None)[:2]
    if not isinstance(x, fx.Node) or not isinstance(dims, list | tuple) or len(dims) != 1:
        return False
    kept = {k: v for k, v in node.kwargs.items() if v is not None}
    return not kept and dims[0] % len(shape_of(x)) == len(shape_of(x)) - 1


def _devices(node: fx.Node) -> set[torch.device]:
    """Where a node and its operands lie; a kernel reads one device only."""
    return {n.meta["val"].device for n in (node, *node.all_input_nodes) if is_tensor(n)}


def _is_lazy(node: fx.Node) -> bool:
    """Whether an operand's memory holds other numbers than its value: a conjugate or a negative
    that PyTorch has only noted."""
    values = [n.meta["val"] for n in node.all_input_nodes if is_tensor(n)]
    return any(v.is_conj() or v.is_neg() for v in values)

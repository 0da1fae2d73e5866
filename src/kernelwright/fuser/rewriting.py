"""Changes of a recorded graph that let programs take in more of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from ..backends.torch_internals import adds_bias_apart, linear_adds_bias_apart, pytree
from ..ops.row.default_eps import default_eps
from .building import MOVES, STEPS
from .norms import RMS_NORMS
from .recorded_ops import (
    ATTENTION,
    LINEAR,
    LINEAR_GELU,
    LINEAR_OF_ACTIVATION,
    LINEAR_OF_PARTS,
    LINEARS,
)
from .row_layout import ACCESS
from .views import PARTS, VIEWS, packet

aten: Any = torch.ops.aten


def drop_factors_of_one(graph: fx.Graph) -> None:
    """Let what reads a tensor times one read the tensor, such as what an adapter whose scale is one
    is given. A result stays a tensor of its own."""
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        x, factor = node.args
        if not isinstance(x, fx.Node) or type(factor) not in (int, float) or factor != 1:
            continue
        mine, made = x.meta["val"], node.meta["val"]
        if (mine.dtype, mine.stride()) == (made.dtype, made.stride()):
            node.replace_all_uses_with(x, delete_user_cb=lambda user: user.op != "output")
    graph.eliminate_dead_code()


def write_out_eps(graph: fx.Graph) -> None:
    """Give RMS norms that were called without an eps the one that PyTorch adds then."""
    for node in graph.find_nodes(op="call_function", target=RMS_NORMS[-1]):
        x, shape, weight, eps = node.args
        if eps is None:
            value = x.meta["val"]
            node.args = (x, shape, weight, default_eps(value.dtype, value.device))


def take_bias_out_of_convolutions(graph: fx.Graph) -> None:
    """Write the bias of a convolution as the addition that PyTorch makes after cuDNN's kernel: a
    program can then add it on its way."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        x, weight, bias, *rest = node.args
        values = [v.meta["val"] for v in (x, weight, bias) if v is not None]
        if bias is None or not adds_bias_apart(*values, *rest):
            continue
        with graph.inserting_after(node):
            shape = [1, -1, *(1 for _ in node.meta["val"].shape[2:])]
            column = graph.call_function(aten.view.default, (bias, shape))
            column.meta["val"] = bias.meta["val"].view(shape)
        _add_after(graph, node, column)
        node.args = (x, weight, None, *rest)


def take_bias_out_of_products(graph: fx.Graph) -> None:
    """The same for linear layers of rows with gaps, such as the tokens of one stream in a batch."""
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        x, weight, bias = node.args
        if bias is not None and linear_adds_bias_apart(x.meta["val"]):
            _add_after(graph, node, bias)
            node.args = (x, weight, None)


# PyTorch's copy of one element of a strided input takes as long as this many multiply-adds of a
# GEMM: 41 us for 2 x 4096 x 1536 (SD3.5 on an H200), where GEMMs run at about 600 TFLOP/s.
COPY_IN_PRODUCTS = 900
# takes the linear layer, its whole input, the first token that it reads and their number
Wanted = Callable[[fx.Node, Tensor, int, int], bool]


def multiply_whole_rows(graph: fx.Graph, wanted: Wanted) -> None:
    """Write a linear layer of most tokens of a batch as a part of its product with all of them: to
    take them out of a batch PyTorch copies them. Only those that are `wanted`."""
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        tokens, weight, bias = node.args
        if bias is not None or tokens.target is not aten.slice.Tensor:
            continue
        rows, dim, start, *_ = (*tokens.args, 0, 0)[: max(3, len(tokens.args))]
        whole, some = rows.meta["val"], tokens.meta["val"]
        count = some.shape[1]
        if whole.ndim != 3 or not whole.is_contiguous() or whole.stride() != some.stride():
            continue
        if dim != 1 or some.is_contiguous():
            continue
        outputs = node.meta["val"].shape[2]
        if (whole.shape[1] - count) * outputs > count * COPY_IN_PRODUCTS:
            continue  # the extra rows of the GEMM would cost more than the copy
        # tensors of one layout share a fake tensor, whose storage offset is therefore meaningless
        first = range(whole.shape[1])[slice(start, None)][0]
        if not wanted(node, whole, first, count):
            continue
        with graph.inserting_before(node):
            product = graph.call_function(LINEAR, (rows, weight, None))
            product.meta["val"] = _called(product)
            part = graph.call_function(aten.slice.Tensor, (product, 1, first, first + count))
            part.meta["val"] = _called(part)
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def copy_rows_of_products(graph: fx.Graph, wanted: Callable[[fx.Node, bool], bool]) -> None:
    """Write down the copy that PyTorch makes of a linear layer's input if its rows do not lie at
    equal distances, such as tokens that a convolution has left across: the program that computes
    them can store them as rows. Only of layers that are `wanted`: this is asked with a layer, and
    with whether its input is computed by a program."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        x, *rest = node.args
        if _lies_in_rows(x.meta["val"]) or not wanted(node, _is_step(x)):
            continue
        if x not in copies:
            with graph.inserting_before(node):
                dense = {"memory_format": torch.contiguous_format}
                copies[x] = graph.call_function(aten.clone.default, (x,), dense)
            copies[x].meta["val"] = _called(copies[x])
        node.args = (copies[x], *rest)


def merge_heads_where_they_lie(graph: fx.Graph, wanted: Callable[[fx.Node], bool]) -> None:
    """Have programs store queries and keys with the heads of a token together. Kernels lay out the
    result of attention as its queries: then a model that merges the heads reads it as it is, where
    it was recorded with a copy. Only of attention that is `wanted`."""
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        query, key = node.args[:2]
        merged = _merged_heads(node)
        if not merged or not _is_computed_apart(query) or not wanted(node):
            continue
        for x in (query, key):
            if _is_computed_apart(x):
                node.replace_input_with(x, _by_tokens(graph, node, x))
        result = node.meta["val"]
        with next(_fake_modes(node), nullcontext()):
            node.meta["val"] = result.transpose(1, 2).contiguous().transpose(1, 2)
        for turned, copies in merged.items():
            turned.meta["val"] = _called(turned)
            for copy in copies:
                copy.replace_all_uses_with(turned)
                graph.erase_node(copy)


def _merged_heads(node: fx.Node) -> dict[fx.Node, list[fx.Node]]:
    """The transposed results of an attention whose heads lie apart, and the copies that are made of
    each; nothing if it is read in another way too."""
    if not _has_heads_apart(node):
        return {}
    merged = {turned: list(turned.users) for turned in node.users}
    for turned, copies in merged.items():
        if not _swaps_heads_and_tokens(turned) or not all(map(_is_dense_copy, copies)):
            return {}
        if any(user.op == "output" for copy in copies for user in copy.users):
            return {}
    return merged


def _swaps_heads_and_tokens(node: fx.Node) -> bool:
    if node.target is aten.transpose.int:
        return {d % 4 for d in node.args[1:]} == {1, 2}
    return node.target is aten.permute.default and list(node.args[1]) == [0, 2, 1, 3]


def _is_dense_copy(node: fx.Node) -> bool:
    dense = {"memory_format": torch.contiguous_format}
    return node.target is aten.clone.default and node.kwargs == dense


def _has_heads_apart(node: Any) -> bool:
    x = node.meta["val"]
    return x.ndim == 4 and min(x.shape[1:3]) > 1 and x.stride(1) > x.stride(2)


def _is_computed_apart(node: fx.Node) -> bool:
    """Whether a program stores this for one op alone, with its heads apart."""
    stored = len(node.users) == 1 and packet(node) in (*STEPS, *MOVES)
    return stored and _has_heads_apart(node)


def _by_tokens(graph: fx.Graph, reader: fx.Node, x: fx.Node) -> fx.Node:
    """The same values, with the heads of a token together."""
    dense = {"memory_format": torch.contiguous_format}
    with graph.inserting_before(reader):
        turned = graph.call_function(aten.transpose.int, (x, 1, 2))
        turned.meta["val"] = _called(turned)
        rows = graph.call_function(aten.clone.default, (turned,), dense)
        rows.meta["val"] = _called(rows)
        back = graph.call_function(aten.transpose.int, (rows, 1, 2))
        back.meta["val"] = _called(back)
    return back


def _is_step(node: fx.Node) -> bool:
    """Whether a value is, or is a view of, what an elementwise op computes."""
    while packet(node) in VIEWS:
        node = node.all_input_nodes[0]
    return packet(node) in STEPS


def _lies_in_rows(x: Tensor) -> bool:
    """Whether its rows are those of a matrix."""
    try:
        x.view(-1, x.shape[-1])
    except (RuntimeError, ValueError):  # a fake tensor raises the second
        return False
    return True


def _add_after(graph: fx.Graph, node: fx.Node, bias: fx.Node) -> None:
    """Have everything that reads a node read its sum with a bias."""
    with graph.inserting_after(bias if bias.op == "call_function" else node):
        total = graph.call_function(aten.add.Tensor, (node, bias))
    total.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def take_gelu_into_products(graph: fx.Graph) -> None:
    """Write a linear layer and the tanh form of GELU after it as one op: cuBLASLt has both in one
    kernel, which rounds once."""
    for node in graph.find_nodes(op="call_function", target=aten.gelu.default):
        product, how = node.args[0], node.kwargs.get("approximate", "none")
        if how != "tanh" or product.target is not LINEAR or len(product.users) > 1:
            continue
        if product.args[2] is None:  # the epilogue needs a bias
            continue
        with graph.inserting_before(node):
            both = graph.call_function(LINEAR_GELU, product.args)
        both.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(both)
        graph.erase_node(node)
        graph.erase_node(product)


def split_products_of_concatenations(graph: fx.Graph) -> None:
    """Write a linear layer of a concatenation as one of its parts, if most of them would be copied:
    those that a program computes are stored in their place."""
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        whole, weight, bias = node.args
        if whole.target is not aten.cat.default or len(whole.users) > 1:
            continue
        parts, dim = (*whole.args, 0)[:2]
        values = [p.meta["val"] for p in parts]
        if dim % values[0].ndim != values[0].ndim - 1 or len({v.dtype for v in values}) > 1:
            continue
        if any(v.shape[-1] * v.element_size() % ACCESS or not _lies_in_rows(v) for v in values):
            continue
        copied = sum(p.meta["val"].shape[-1] for p in parts if not _is_step(p))
        # a product for each part reads the result of those before it, and writes it again
        if copied <= (len(parts) - 1) * weight.meta["val"].shape[0]:
            continue
        with graph.inserting_before(node):
            split = graph.call_function(LINEAR_OF_PARTS, (parts, weight, bias))
        split.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(split)
        graph.erase_node(node)
        graph.erase_node(whole)


def take_activations_into_products(graph: fx.Graph, wanted: Callable[[fx.Node], bool]) -> None:
    """Write an activation, possibly gated or behind a concatenation, and the linear layer of it as
    one op: an fp8 GEMM has to quantise its rows, and that pass can compute them. Only layers that
    are `wanted`."""
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        found = _activated(node.args[0])
        if found is None or not wanted(node):
            continue
        x, *how = found
        with graph.inserting_before(node):
            both = graph.call_function(LINEAR_OF_ACTIVATION, (x, *node.args[1:], *how))
        both.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(both)
        graph.erase_node(node)
    graph.eliminate_dead_code()


# what an activation is made of: (x, its name, what it is multiplied by, what is to the left of it)
Activated = tuple[fx.Node, str, fx.Node | None, fx.Node | None]


def _activated(node: fx.Node) -> Activated | None:
    """The parts of act(x), act(x) * up or a concatenation of something and either of these, if
    nothing else reads what lies between and x and up are in memory: parts of products."""
    if len(node.users) > 1:
        return None
    if node.target is aten.cat.default:
        parts, dim = (*node.args, 0)[:2]
        if len(parts) != 2 or dim % node.meta["val"].ndim != node.meta["val"].ndim - 1:
            return None
        inner = _activated(parts[1])
        return None if inner is None or inner[3] is not None else (*inner[:3], parts[0])
    if (found := _activation(node)) is not None:
        return (*found, None, None)
    for gate, up in (node.args, node.args[::-1]) if node.target is aten.mul.Tensor else ():
        found = _activation(gate)
        if found is not None and len(gate.users) == 1 and _is_product(up):
            values = [n.meta["val"] for n in (gate, up)]
            if len({(v.shape, v.dtype) for v in values}) == 1:
                return (*found, up, None)
    return None


def _activation(node: Any) -> tuple[fx.Node, str] | None:
    """The product that an activation is of, and the activation's name."""
    target = getattr(node, "target", None)
    if target is aten.silu.default:
        name = "silu"
    elif target is aten.gelu.default:
        name = "gelu" if node.kwargs.get("approximate", "none") == "none" else "gelu_tanh"
    else:
        return None
    return (node.args[0], name) if _is_product(node.args[0]) else None


def _is_product(node: Any) -> bool:
    """Whether a value is a product, or a view of a part of one."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in (LINEAR, LINEARS, LINEAR_OF_ACTIVATION):
            return True
        part_of = getattr(node.target, "__name__", "") == "getitem"
        if not part_of and packet(node) not in (*VIEWS, *PARTS):
            return False
        node = node.all_input_nodes[0]
    return False


def join_products_of_one_input(graph: fx.Graph, wanted: Callable[[list[fx.Node]], bool]) -> None:
    """Write linear layers of one input as one op, whose results are parts of one tensor; only those
    that are `wanted`."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        found.setdefault(node.args[0], []).append(node)
    for nodes in found.values():
        if len(nodes) > 1 and _have_one_form(nodes) and wanted(nodes):
            _Joined(graph, nodes).write()


def _have_one_form(nodes: list[fx.Node]) -> bool:
    """Whether all or none have a bias, and each part of the result begins where a vector may."""
    widths = [n.meta["val"].shape[-1] * n.meta["val"].element_size() for n in nodes]
    biases = {n.args[2] is None for n in nodes}
    own = {n.args[1] for n in nodes}
    return len(biases) == 1 and len(own) == len(nodes) and not any(w % ACCESS for w in widths)


class _Joined:
    """Linear layers that become parts of one product. Views of their results then lie otherwise;
    where one cannot be, everything stays as it was."""

    def __init__(self, graph: fx.Graph, nodes: list[fx.Node]) -> None:
        self.graph, self.nodes = graph, nodes
        self.before: dict[fx.Node, Any] = {}

    def write(self) -> None:
        x = self.nodes[0].args[0]
        weights = [n.args[1] for n in self.nodes]
        biases = [n.args[2] for n in self.nodes if n.args[2] is not None]
        with self.graph.inserting_before(self.nodes[0]):
            both = self.graph.call_function(LINEARS, (x, weights, biases))
            both.meta["val"] = _called(both)
            parts = [
                self.graph.call_function(operator.getitem, (both, i))
                for i in range(len(self.nodes))
            ]
        for node, part, value in zip(self.nodes, parts, both.meta["val"], strict=True):
            part.meta["val"] = value
            node.replace_all_uses_with(part)
        try:
            self._move_views(parts)
        except (RuntimeError, ValueError):  # a fake tensor raises the second
            for view, value in self.before.items():
                view.meta["val"] = value
            for node, part in zip(self.nodes, parts, strict=True):
                part.replace_all_uses_with(node)
                self.graph.erase_node(part)
            self.graph.erase_node(both)
            return
        for node in self.nodes:
            self.graph.erase_node(node)

    def _move_views(self, parts: list[fx.Node]) -> None:
        """Say of all views of the parts how they lie now; raises where one cannot be a view."""
        moved = set(parts)
        for node in self.graph.nodes:
            source = node.all_input_nodes[0] if node.all_input_nodes else None
            part_of = getattr(node.target, "__name__", "") == "getitem"
            if source not in moved or not (part_of or packet(node) in (*VIEWS, *PARTS)):
                continue
            self.before[node] = node.meta["val"]
            node.meta["val"] = _called(node)
            moved.add(node)


def _called(node: fx.Node) -> Any:
    """The result of a node, of what its arguments were when recorded."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with next(_fake_modes(node), nullcontext()):
        return node.target(*args, **kwargs)


def _fake_modes(node: fx.Node) -> Iterator[Any]:
    for n in node.all_input_nodes:
        for value in pytree.tree_leaves(n.meta["val"]):
            if (mode := getattr(value, "fake_mode", None)) is not None:
                yield mode

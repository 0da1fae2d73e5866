"""Changes of a recorded graph that let programs take in more of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..backends.torch_internals import adds_bias_apart
from .recording import LINEAR, LINEAR_GELU

aten: Any = torch.ops.aten


def take_bias_out_of_convolutions(graph: fx.Graph) -> None:
    """Write the bias of a convolution as the addition that PyTorch makes after cuDNN's kernel: a
    program can then add it on its way."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        x, weight, bias, *rest = node.args
        values = [v.meta["val"] for v in (x, weight, bias) if v is not None]
        if bias is None or not adds_bias_apart(*values, *rest):
            continue
        result = node.meta["val"]
        with graph.inserting_after(node):
            shape = [1, -1, *(1 for _ in result.shape[2:])]
            column = graph.call_function(aten.view.default, (bias, shape))
            column.meta["val"] = bias.meta["val"].view(shape)
        with graph.inserting_after(column):
            total = graph.call_function(aten.add.Tensor, (node, column))
            total.meta["val"] = result
        node.replace_all_uses_with(
            total, delete_user_cb=lambda user, total=total: user is not total
        )
        node.args = (x, weight, None, *rest)


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

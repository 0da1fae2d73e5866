"""The eager chain F.gelu(F.linear(...)) as one torch.library op, so torch.compile keeps its bits.

Inductor would split F.linear and F.gelu and round in other places than eager does. The backward
recomputes the chain.
"""

from __future__ import annotations

from torch import Tensor

from .. import gradient, library
from .reference import linear_gelu

ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, bool approximate"


def node(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: bool) -> Tensor:
    """GELU(x @ weight^T + bias) as one node of a graph."""
    return _node(x, weight, bias, approximate)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_node = library.define("linear_gelu", f"({ARGUMENTS}) -> Tensor", linear_gelu, _fake)
gradient.recompute(_node, "linear_gelu", ARGUMENTS.split(", "), linear_gelu, steps=linear_gelu)

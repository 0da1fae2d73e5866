"""A linear layer of a concatenation, without the concatenation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import algorithms


def linear_of_parts(parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear(torch.cat(parts, -1), weight, bias), as a GEMM for each part, all after the first
    accumulating into its result, which is rounded in between. 1142 against 1205 us at 4608 rows of
    3072 and 12288 on an H200."""
    first, *others = parts
    weights = weight.split_with_sizes([p.shape[-1] for p in parts], dim=1)
    y = algorithms.linear(first, weights[0], bias)
    for part, w in zip(others, weights[1:], strict=True):
        y.flatten(0, -2).addmm_(part.flatten(0, -2), w.t())
    return y

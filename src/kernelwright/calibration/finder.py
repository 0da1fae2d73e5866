"""Finds the order in which an op sums rows, from outside.

A row holds one large square and two small ones, and zeros. Each small one is lost if it meets the
large one alone, since it is half a unit of its last place; both together are a whole unit. So the
result tells whether the two met first, and many such rows tell the tree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.ways import SUBJECTS
from .trees import tree_of

LARGE, SMALL = 2.0**12, 1.0  # of their squares, 2^24 and 1, float32 cannot hold the sum
TRIPLES = 1024
Triple = tuple[int, int, int]


def triples(width: int, count: int = TRIPLES, seed: int = 0) -> list[Triple]:
    """Elements (i, j, k): neighbours, elements that are a power of two apart, and any."""
    draw = random.Random(seed)
    found: set[Triple] = set()
    while len(found) < count:
        i = draw.randrange(width)
        steps = [1 << draw.randrange(width.bit_length()), 1 << draw.randrange(width.bit_length())]
        j = (i + steps[0]) % width if draw.random() < 0.8 else draw.randrange(width)
        k = (i + steps[1]) % width if draw.random() < 0.5 else draw.randrange(width)
        if len({i, j, k}) == 3:
            found.add((i, j, k))
    return sorted(found)


def rows_of(asked: Sequence[Triple], width: int, dtype: torch.dtype, device: str) -> Tensor:
    """[2, triples, width]: the rows, and the same without the small elements."""
    rows = torch.zeros(2, len(asked), width, dtype=dtype)
    at = torch.arange(len(asked))
    i, j, k = torch.tensor(asked).unbind(-1)
    rows[:, at, k] = LARGE
    rows[0, at, i] = rows[0, at, j] = SMALL
    return rows.to(device)


def probed(subject: str, rows: Tensor) -> Tensor:
    """What an op makes of each row, so that one unit in the last place of its sum shows."""
    width = rows.shape[-1]
    if subject == "at::mean":
        return rows.float().pow(2).mean(-1)
    # a negative eps takes all but 16 units of the mean away: one more is some percent of the rest
    eps = -(LARGE * LARGE / width) * (1 - 2.0**-19)
    return F.rms_norm(rows, (width,), None, eps).float().abs().amax(-1)


def met_first(subject: str, asked: Sequence[Triple], rows: Tensor) -> list[bool]:
    """Of each triple, whether i and j met before k."""
    with_small, without = probed(subject, rows.view(prod(rows.shape[:2]), -1)).view(2, len(asked))
    return (with_small != without).tolist()


def matching_ways(
    subject: str,
    width: int,
    dtype: torch.dtype,
    device: str,
    observe: Callable[[str, Sequence[Triple], Tensor], list[bool]] = met_first,
    ways: Iterable[str] | None = None,
) -> list[str]:
    """The ways whose tree the installed op has, at this width and many rows."""
    asked = triples(width)
    seen = observe(subject, asked, rows_of(asked, width, dtype, device))
    found = []
    for way in SUBJECTS[subject] if ways is None else ways:
        tree = tree_of(subject, way, width, 2 * len(asked), dtype.itemsize)
        if tree is not None and tree.meet_first(asked) == seen:
            found.append(way)
    return found

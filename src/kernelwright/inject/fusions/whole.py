"""A sum that a graph of torch.compile makes in one piece.

Inductor makes each part of a sum where it is read: the six parts of a modulation in LTX-Video's
block in four kernels, which take longer to launch than to run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import library


def total(a: Tensor, b: Tensor) -> Tensor:
    """a + b"""
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return TOTAL(a, b)
    return a + b


TOTAL = library.define_unrecorded("total", "(Tensor a, Tensor b) -> Tensor", torch.add, torch.add)

"""For every model: a block as the programs of the fuser, if no recipe was written for it."""

from __future__ import annotations

from typing import Any

import torch

from ..fusions import Fusions
from ..reuse.recordable import signature
from ._recipe import Forward, Patch


def block(fuse: Fusions) -> Forward:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return NotImplemented
        return fuse.programs.run(self, args, kwargs)

    return forward


# which modules are blocks is decided by where they are, so planning chooses this patch itself
BLOCK = Patch(
    lambda module: True,
    block,
    "its ops between products and attention in a few kernels",
    signature=signature,
    same_strides=True,
)

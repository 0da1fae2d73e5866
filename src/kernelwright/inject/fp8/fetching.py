"""Methods of modules that read weights: those of fp8 layers are on the GPU before they run.

Diffusers' `fuse_qkv_projections` concatenates the weights of an attention's projections into a new
layer, on the device of the first one. While 16-bit weights rest on the CPU, each module with such a
method has one of its own that fetches them first; `restore` takes it off.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..runtime import forwards
from ..runtime.forwards import MARK

METHOD = "fuse_projections"


def fetch_before_fusing(root: nn.Module) -> None:
    """Have the modules inside `root` fetch weights before their projections are fused."""
    for module in root.modules():
        if callable(getattr(type(module), METHOD, None)) and METHOD not in vars(module):
            setattr(module, METHOD, functools.partial(_fuse_projections, module))


def fuse_as_they_lie(root: nn.Module) -> None:
    """Undo `fetch_before_fusing`."""
    for module in root.modules():
        if getattr(vars(module).get(METHOD), "func", None) is _fuse_projections:
            delattr(module, METHOD)


def _fuse_projections(module: Any, *args: Any, **kwargs: Any) -> Any:
    for layer in module.modules():
        eight: Any = getattr(forwards.installed(layer), MARK, None)
        if hasattr(eight, "fetch"):
            eight.resting.refuse_dropped([layer], METHOD)
            eight.fetch(layer)
    return getattr(type(module), METHOD)(module, *args, **kwargs)

"""The 16-bit weights of a whole model: given back to its fp8 layers, or kept off the GPU from the
start."""

from __future__ import annotations

import torch
from torch import nn

from ..runtime import forwards
from ..runtime.forwards import MARK
from ..state.weights_at_rest import is_at_rest
from .fetching import fuse_as_they_lie
from .layers import Fp8Layers


def restore_weights(root: nn.Module, what: str) -> None:
    """Give all fp8 layers inside `root` their 16-bit weights back, where they were. If some were
    dropped, this raises an error before anything is changed."""
    found: dict[Fp8Layers, list[nn.Module]] = {}
    for module in root.modules():
        mark = getattr(forwards.installed(module), MARK, None)
        if isinstance(mark, Fp8Layers):
            found.setdefault(mark, []).append(module)
    for eight, layers in found.items():
        eight.resting.refuse_dropped(layers, what)
    for eight, layers in found.items():
        eight.resting.bring_back(layers)
    fuse_as_they_lie(root)


def place(root: nn.Module, device: torch.device, eight: Fp8Layers | None) -> None:
    """Move a model to `device`, layer by layer: the 16-bit weights of fp8 layers stay on the CPU,
    and are on `device` only while they are quantised."""
    if eight is not None and eight.resting.keep != "gpu":
        with torch.no_grad():
            for module in root.modules():
                weight = module._parameters.get("weight")
                if eight.may_place(module) and weight is not None and not weight.is_meta:
                    eight.quantise_now(module, device)
    for module in root.modules():
        for held in (module._parameters, module._buffers):
            for tensor in held.values():
                if tensor is not None and not is_at_rest(tensor):
                    tensor.data = tensor.data.to(device)

"""Where the 16-bit weights of fp8 layers are while nothing reads them.

Once a layer was compared and runs in fp8, its 16-bit weight is moved to pinned memory of the CPU
(`keep="cpu"`), stays on the GPU (`keep="gpu"`), or is dropped (`keep=None`). The parameter remains
the same object with the same values: files, copies and adapters see what they saw before. Whatever
needs the weight on the GPU again, such as a comparison, an adapter or `restore`, fetches it; the
memory on the CPU is kept for the next time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..graphs.capture import relocated
from ..reuse.prompt_values import MadeFrom
from ..state.weights_at_rest import is_at_rest, note_at_rest
from .memory_blocks import GpuBlocks
from .pinned_memory import PinnedMemory

KEEP = ("cpu", "gpu", None)
# weights that were moved by others LIMIT times after fewer than CALLS calls are moved routinely, as
# group offload does: leave them where they are
CALLS, LIMIT = 8, 3


def leaves_gpu(weight: Tensor) -> bool:
    """Whether moving a weight to the CPU frees memory of a GPU."""
    return weight.is_cuda


class WeightsDropped(RuntimeError):
    """The 16-bit weights are needed, and `keep=None` has dropped them."""


@dataclass(eq=False)
class _Rest:
    """The weight of a layer on the CPU."""

    copy: Tensor
    home: torch.device
    dropped: Any = None  # removes the hook on the layer's state_dict
    awake: bool = False  # the weight was fetched since it was put there
    fetched: MadeFrom | None = None  # the weight as it was fetched from `copy`
    calls: int = 0
    moved: int = 0


@dataclass(eq=False)
class Resting:
    """The 16-bit weights of one injection's fp8 layers."""

    keep: str | None = "cpu"
    # layers whose weights stay where they are, and why
    staying: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    _rests: WeakKeyDictionary[nn.Module, _Rest] = field(default_factory=WeakKeyDictionary)
    _memory: PinnedMemory = field(default_factory=PinnedMemory)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _home: torch.device | None = None

    def is_due(self, layer: Any) -> bool:
        """Whether the weight of a layer that runs in fp8 is to leave the GPU now."""
        if self.keep == "gpu" or layer in self.staying:
            return False
        weight, rest = layer._parameters["weight"], self._rests.get(layer)
        if rest is not None and not rest.awake:
            if _is_same_memory(weight, rest.copy):
                rest.calls += 1
                return self.keep is None and rest.dropped is None
            # somebody has moved it since, such as `.to()` or an offload hook
            rest.moved += rest.calls < CALLS
            rest.calls = 0
            if rest.moved >= LIMIT:
                self.staying[layer] = "its weight keeps being moved, as by offloading"
                return False
        return leaves_gpu(weight) and _fills_storage(weight)

    def rest(self, layer: Any, epoch: int) -> None:
        """Move the weight of a layer off the GPU."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            weight, rest = layer._parameters["weight"], self._rests.get(layer)
            at_rest = rest is not None and _is_same_memory(weight, rest.copy)
            home = rest.home if rest is not None and at_rest else weight.device
            if self.keep is None:
                copy = torch.full((1, 1), torch.nan, dtype=weight.dtype).expand(weight.shape)
                rest = _Rest(copy, home, layer.register_state_dict_pre_hook(_refuse_state_dict))
            elif rest is None or rest.copy.shape != weight.shape or rest.copy.dtype != weight.dtype:
                rest = _Rest(self._memory.like(weight).copy_(weight), home)
            else:
                if rest.fetched is None or not rest.fetched.holds((weight,), epoch):
                    rest.copy.copy_(weight)
                rest.home, rest.awake, rest.fetched = home, False, None
            self._put(layer, rest)

    def place(self, layer: Any, home: torch.device) -> None:
        """Let the weight of a layer rest that has never been on `home`, where its layer will run:
        in pinned memory instead of where it was loaded to."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            weight = layer._parameters["weight"]
            self._put(layer, _Rest(self._memory.like(weight).copy_(weight), home))

    def settle(self, layer: Any, memory: GpuBlocks) -> None:
        """Move the weight of a layer that stays in 16 bits away from those that leave. PyTorch puts
        weights of some MiB into one segment of its memory, and frees that when all have left: 56
        weights of LTX-Video, 448 MiB, kept 1.75 GiB."""
        weight = weight_of(layer)
        if self.keep == "gpu" or layer in self.staying or type(weight) is not nn.Parameter:
            return
        if leaves_gpu(weight) and _fills_storage(weight):
            with self._lock, torch.inference_mode(False), torch.no_grad():
                weight.data = memory.alone(weight.data)
                relocated()

    def _put(self, layer: Any, rest: _Rest) -> None:
        weight = layer._parameters["weight"]
        weight.data = rest.copy
        note_at_rest(weight)
        self._rests[layer], self._home = rest, rest.home
        relocated()

    def wake(self, layer: Any, epoch: int) -> bool:
        """Bring the weight of a layer back to its GPU; False if it was dropped."""
        rest = self._rests.get(layer)
        if rest is None:
            return True
        with self._lock, torch.inference_mode(False), torch.no_grad():
            weight = layer._parameters.get("weight")
            if weight is None or rest.awake or not self.is_at_rest(layer):
                return True
            if rest.dropped is not None:
                return False
            # not of rest.copy: others may have replaced it, as `.to(dtype)` does
            unmoved = _is_same_memory(weight, rest.copy)
            weight.data = weight.data.to(rest.home, copy=True)
            rest.awake, rest.fetched = True, MadeFrom.of((weight,), epoch) if unmoved else None
            relocated()
            return True

    def move(self, module: nn.Module, device: torch.device) -> None:
        """Bring all weights inside a module that is no longer a plain layer to a device. What
        others have computed of a weight that rested, as weight_norm does, lies beside it."""
        weights = [*module.parameters(), *module.buffers()]
        if not any(map(is_at_rest, weights)):
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            for weight in weights:
                if weight.device.type == "cpu":
                    weight.data = weight.data.to(device, copy=True)

    def home_of(self, layer: Any) -> torch.device | None:
        """The device from which the weight of a layer has come; of a layer that has replaced one,
        or is a copy, that of the others."""
        rest = self._rests.get(layer)
        return self._home if rest is None else rest.home

    def is_home(self, device: torch.device) -> bool:
        """Whether weights have come from this device."""
        return self._home == device

    def is_dropped(self, layer: Any) -> bool:
        rest = self._rests.get(layer)
        return rest is not None and rest.dropped is not None

    def is_at_rest(self, layer: Any) -> bool:
        """Whether the weight of a layer is on the CPU because of us. So is what others have made of
        it there since, such as `.to(dtype)`."""
        weight, rest = layer._parameters.get("weight"), self._rests.get(layer)
        if type(weight) is not nn.Parameter or weight.device.type != "cpu":
            return False
        return is_at_rest(weight) or (rest is not None and not rest.awake)

    def refuse_dropped(self, layers: list[Any], what: str) -> None:
        """Raise an error if the weight of one of these layers is gone."""
        if count := sum(map(self.is_dropped, layers)):
            raise WeightsDropped(
                f"{what}: the 16-bit weights of {count} layers were dropped (keep=None) and cannot "
                f'be brought back; load the model again, and inject it with keep="cpu"'
            )

    def bring_back(self, layers: list[Any]) -> None:
        """Give layers their weights back, on the device they were on. Layers of a copy of the model
        go where those of the original were."""
        for layer in layers:
            if layer in self._rests:
                self.wake(layer, -1)
                del self._rests[layer]
            elif self._home is not None and self.is_at_rest(layer):
                layer._parameters["weight"].data = layer._parameters["weight"].data.to(self._home)

    def describe(self) -> str | None:
        """One line for the report, or None if no weight has left its GPU."""
        rests = [r for r in self._rests.values() if not r.awake]
        if not rests:
            return None
        size = sum(r.copy.numel() * r.copy.element_size() for r in rests) / 2**30
        where = "dropped" if self.keep is None else "in CPU memory"
        return f"16-bit weights of {len(rests)} fp8 layers are {where}, {size:.2f} GiB"


def weight_of(layer: Any) -> Any:
    """The weight of a layer, be it a plain attribute; None if a parametrization has it."""
    return layer._parameters.get("weight", layer.__dict__.get("weight"))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype


def _fills_storage(weight: Tensor) -> bool:
    """Whether moving a weight frees its memory: not a view into something larger."""
    return weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes


def _refuse_state_dict(module: nn.Module, prefix: str, *_: Any) -> None:
    name = f"{prefix}weight"
    raise WeightsDropped(
        f"state_dict: the 16-bit weight {name!r} was dropped (keep=None); to save or copy a model "
        f'after injection, inject it with keep="cpu"'
    )

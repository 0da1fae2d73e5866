"""What all backends share: the description of a launch, the GPU it is for, and how it is loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch


class Unsupported(Exception):
    """A kernel cannot run this signature; the message says why."""


class Launch(Protocol):
    """A kernel with everything about its launch but the addresses.

    `pointers` names the op's arguments and outputs in kernel order, "" for a kernel pointer that
    the op does not have; every address must be a multiple of `alignment` bytes. `load` returns a
    function that takes the addresses of the tensors that are present.
    """

    @property
    def pointers(self) -> tuple[str, ...]: ...
    @property
    def alignment(self) -> int: ...

    def load(self, values: Mapping[str, Any], device: int) -> Callable[[Sequence[Any]], None]: ...


@dataclass(frozen=True)
class Target:
    """The GPU that a launch is planned for."""

    capability: tuple[int, int]
    multiprocessors: int

    @staticmethod
    def of(device: torch.device) -> Target:
        return _target(device.index) if device.type == "cuda" else HOPPER

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


HOPPER = Target((9, 0), 132)


@functools.lru_cache
def _target(index: int | None) -> Target:
    properties = torch.cuda.get_device_properties(index)
    return Target((properties.major, properties.minor), properties.multi_processor_count)


def load(
    launch: Launch, values: Mapping[str, Any], device: torch.device, op: str
) -> Callable[[Sequence[Any]], None]:
    """Build or fetch the kernel; the function returned launches it, given the addresses."""
    if device.type != "cuda":
        return launch.load(values, -1)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: its kernel for this signature is not built yet, and building it would break "
            f"the CUDA graph being captured; call the op once with these shapes before capturing"
        )
    with torch.cuda.device(device):
        return launch.load(values, device.index)


@functools.lru_cache
def installed(module: str) -> bool:
    return find_spec(module) is not None

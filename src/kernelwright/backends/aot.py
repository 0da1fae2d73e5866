"""CUDA C++ kernels compiled ahead of time: the launches of `cuda.py` with kernels from a library.

The library (`hub/ltx-kernels-aot`) holds instances of the templates in the `.cuh` files, each under
the text of its `CudaLaunch.template`. An instance that is not in it cannot run: nothing is
compiled.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .launch import Unsupported, installed

if TYPE_CHECKING:
    from .cuda import CudaLaunch

# the module that `pip install ./hub/ltx-kernels-aot` installs
MODULE = "ltx_kernels_aot"
_connected: list[Any] = []


def connect(ops: Any) -> None:
    """Take the kernels from this torch.ops namespace; each Hub package has its own."""
    _connected[:] = [ops]
    _launcher.cache_clear()
    kernels.cache_clear()


def problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"tensors are on {device.type}, CUDA kernels need a CUDA GPU"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not _connected and not installed(MODULE):
        return "its library is not built (pip install --no-build-isolation ./hub/ltx-kernels-aot)"
    try:
        _launcher()
    except (ImportError, OSError, AttributeError) as error:
        return f"its library does not load with torch {torch.__version__}: {error}"
    return None


@functools.lru_cache
def _launcher() -> Any:
    """The namespace with `kernels`, `prepare` and `launch`."""
    if not _connected:
        from importlib import import_module

        _connected.append(import_module(MODULE).ops)
    ops = _connected[0]
    ops.launch.default  # noqa: B018  raises where the library did not register it
    return ops


@functools.lru_cache
def kernels() -> frozenset[str]:
    """The template instances in the library."""
    return frozenset(_launcher().kernels())


@dataclass(frozen=True)
class AotLaunch:
    """A launch of the `cuda` backend with a kernel from the library."""

    cuda: CudaLaunch

    @property
    def pointers(self) -> tuple[str, ...]:
        return self.cuda.pointers

    @property
    def alignment(self) -> int:
        return self.cuda.alignment

    def load(self, values: Mapping[str, Any], device: int) -> Callable[[Sequence[int]], None]:
        cuda, ops = self.cuda, _launcher()
        present = [values.get(n) is not None for n in cuda.pointers]
        prepared = ops.prepare(cuda.template, cuda.grid, cuda.block, present, self.words)
        # call the overload's `op` directly: the overload itself is one more Python frame
        launch = getattr(ops.launch.default, "op", ops.launch.default)
        return functools.partial(launch, prepared)

    @property
    def words(self) -> list[int]:
        """The kernel's struct of scalars, which follows its pointers, as 8-byte words."""
        packed = struct.pack(f"@{self.cuda.layout}0q", *self.cuda.scalars)
        return [w for (w,) in struct.iter_unpack("@q", packed)]


def compiled(launch: CudaLaunch) -> AotLaunch:
    """The launch with the library's kernel; raises Unsupported if the library has none."""
    if launch.template not in kernels():
        raise Unsupported(
            f"the library has no {launch.template}; build it with this shape among its cases, "
            f"or use backend 'cuda'"
        )
    return AotLaunch(launch)

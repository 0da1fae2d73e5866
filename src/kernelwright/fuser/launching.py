"""Runs programs as CUDA kernels: compiled by NVRTC once a source, launched with its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .. import backends
from ..backends import Unsupported
from ..backends.cuda import CudaLaunch
from . import cuda_source
from .cuda_source import ENTRY, Kernel
from .program import Program
from .row_layout import ACCESS

MAX_ROWS = 2**32 - 1


@dataclass(frozen=True)
class ProgramLaunch(CudaLaunch):
    """A launch of generated source."""

    text: str = ""

    @property
    def entry(self) -> str:
        return ENTRY

    @property
    def code(self) -> str:
        return self.text


def launch_of(kernel: Kernel) -> ProgramLaunch:
    rows = prod(kernel.extents)
    if rows > MAX_ROWS:
        raise Unsupported(f"{rows} rows")
    padded = [s or [0] for s in kernel.strides]
    extents = kernel.extents or [1]
    return ProgramLaunch(
        source="fuser",
        template=ENTRY,
        arguments="Args",
        grid=-(-rows // kernel.rows_per_block),
        block=kernel.block,
        pointers=tuple(f"{name} {i}" for i, (name, _) in enumerate(kernel.pointers)),
        layout=f"{sum(map(len, padded))}q{len(extents)}II",
        scalars=(*(s for stride in padded for s in stride), *extents, rows),
        text=kernel.code,
    )


def why_not(program: Program, values: Mapping[str, Any]) -> str | None:
    """Why there is no kernel of a program, or None; `values` are what a graph was recorded with."""
    layout = {n: cuda_source.Tensor(values[n].stride(), values[n].dtype) for n in program.loads}
    layout |= {s.target: cuda_source.Tensor(s.strides, s.dtype) for s in program.stores}
    try:
        launch_of(cuda_source.kernel(program, layout))
    except Unsupported as no:
        return str(no)
    return None


class Launched:
    """One program on one GPU, for tensors of one layout."""

    def __init__(
        self, program: Program, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        layout = {n: cuda_source.Tensor(t.stride(), t.dtype) for n, t in tensors.items()}
        kernel = cuda_source.kernel(program, layout)
        launch = launch_of(kernel)
        # a kernel sees a complex tensor as one of pairs
        sizes = {n: t.element_size() // (1 + t.is_complex()) for n, t in tensors.items()}
        # (name, bytes to add to its address, what the sum has to be a multiple of)
        self.places = [
            (name, offset * sizes[name], min(ACCESS, kernel.alignment * sizes[name]))
            for name, offset in kernel.pointers
        ]
        present = dict.fromkeys(launch.pointers, True)
        self.launch: Callable[[Sequence[int]], None] = backends.load(
            launch, present, device, "a program"
        )

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        addresses = [tensors[name].data_ptr() + offset for name, offset, _ in self.places]
        for address, (name, _, multiple) in zip(addresses, self.places, strict=True):
            if address % multiple:
                raise Unsupported(f"{name} does not begin at a multiple of {multiple} bytes")
        self.launch(addresses)

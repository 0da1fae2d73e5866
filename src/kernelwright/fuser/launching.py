"""Runs programs as CUDA kernels: compiled by NVRTC once a source, launched with its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from operator import add, itemgetter, mod
from typing import Any

import torch

from .. import backends
from ..backends import Target, Unsupported
from ..backends.cuda import CudaLaunch, compile_cubin
from . import cuda_source, cuda_tiles, cuda_transpose
from .cuda_kernel import ENTRY, Kernel
from .eight_bit_rows import contiguous_strides, eight_bit_rows
from .program import Program
from .row_layout import ACCESS

MAX_ROWS = 2**31 - 1


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


def kernel_of(
    program: Program, layout: Mapping[str, cuda_source.Tensor], exact: bool = True
) -> Kernel:
    """The kernel of a program whose tensors lie so."""
    return (
        cuda_transpose.kernel(program, layout)
        or cuda_tiles.kernel(program, layout, exact)
        or cuda_source.kernel(program, layout, exact)
    )


def launch_of(kernel: Kernel, multiprocessors: int = 1) -> ProgramLaunch:
    rows = prod(kernel.extents)
    if rows > MAX_ROWS:
        raise Unsupported(f"{rows} rows")
    return ProgramLaunch(
        source="fuser",
        template=ENTRY,
        arguments="Args",
        grid=kernel.grid(multiprocessors),
        block=kernel.block,
        pointers=tuple(f"{name} {i}" for i, (name, _) in enumerate(kernel.pointers)),
        layout=kernel.layout,
        scalars=tuple(kernel.numbers),
        text=kernel.code,
    )


class Kernels:
    """The kernels of a plan's programs, compiled side by side."""

    def __init__(self, exact: bool = True) -> None:
        self.exact = exact
        self._known: dict[Program, Kernel] = {}

    def why_not(self, program: Program, values: Mapping[str, Any]) -> str | None:
        """Why there is no kernel of a program, or None; `values` are what was recorded."""
        try:
            launch_of(self._kernel(program, layout_of([program], values)))
        except Unsupported as no:
            return str(no)
        return None

    def launched(
        self, programs: Sequence[Program], values: Mapping[str, Any], device: torch.device
    ) -> dict[int, Launched]:
        """The programs on a GPU, by their ids."""
        layout = layout_of(programs, values)
        kernels = [self._kernel(program, layout) for program in programs]
        arch = Target.of(device).arch
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda code: compile_cubin(code, arch), {k.code for k in kernels}))
        sizes = {name: t.dtype.itemsize for name, t in layout.items()}
        pairs = zip(programs, kernels, strict=True)
        return {id(p): Launched(kernel, sizes, device) for p, kernel in pairs}

    def _kernel(self, program: Program, layout: Mapping[str, cuda_source.Tensor]) -> Kernel:
        if program not in self._known:
            self._known[program] = kernel_of(program, layout, self.exact)
        return self._known[program]


def layout_of(
    programs: Sequence[Program], values: Mapping[str, Any]
) -> dict[str, cuda_source.Tensor]:
    """How the tensors lie that programs load and store."""
    found = {s.target: cuda_source.Tensor(s.strides, s.dtype) for p in programs for s in p.stores}
    for made in (m for program in programs for m in eight_bit_rows(program)):
        for name, shape, dtype in made.parts():
            found[name] = cuda_source.Tensor(contiguous_strides(shape), dtype)
    for name in (name for program in programs for name in program.loads if name not in found):
        found[name] = cuda_source.Tensor(values[name].stride(), values[name].dtype)
    return {name: t.as_real() for name, t in found.items()}


class Launched:
    """One program on one GPU, for tensors of one layout."""

    def __init__(self, kernel: Kernel, sizes: Mapping[str, int], device: torch.device) -> None:
        launch = launch_of(kernel, Target.of(device).multiprocessors)
        # (name, bytes to add to its address, what the sum has to be a multiple of)
        self.places = [
            (name, offset * sizes[name], min(ACCESS, kernel.alignment * sizes[name]))
            for name, offset in kernel.pointers
        ]
        present = dict.fromkeys(launch.pointers, True)
        self.launch: Callable[[Sequence[int]], None] = backends.load(
            launch, present, device, "a program"
        )

    def bound(self, places: Mapping[str, int]) -> Callable[[list[Any]], bool]:
        """What launches the program with the tensors at these places of a list. It returns False,
        and launches nothing, if an address is no multiple of what the kernel reads at once."""
        names, offsets, multiples = zip(*self.places, strict=True)
        # of a single place, `itemgetter` makes no tuple; `map` stops with the shorter `offsets`
        read = itemgetter(*(places[name] for name in names), places[names[0]])
        launch = self.launch

        def run(values: list[Any]) -> bool:
            addresses = list(map(add, map(torch.Tensor.data_ptr, read(values)), offsets))
            if any(map(mod, addresses, multiples)):
                return False
            launch(addresses)
            return True

        return run

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        addresses = [tensors[name].data_ptr() + offset for name, offset, _ in self.places]
        for address, (name, _, multiple) in zip(addresses, self.places, strict=True):
            if address % multiple:
                raise Unsupported(f"{name} does not begin at a multiple of {multiple} bytes")
        self.launch(addresses)

"""Triton kernels: compiled once, then launched without Triton's Python dispatch.

`kernel[grid](...)` binds, specialises and looks up on every call (20 us on the H200 machine's CPU);
the compiled kernel's `run` takes 8. A plan keeps the driver function that `run` calls in the end,
so Python passes only addresses.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from . import torch_internals
from .launch import installed


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if not installed("triton"):
        return "triton is not installed"
    if device.type != "cuda":
        if interpreting():
            return None
        return f"tensors are on {device.type}, Triton kernels need a CUDA GPU"
    if interpreting():
        return "TRITON_INTERPRET=1 is set"
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton has no bfloat16 on compute capability 7.5; use float16 or the cuda backend"
    return None


@dataclass(frozen=True)
class _Address:
    """A stand-in for a tensor of this dtype and alignment while Triton specialises a kernel."""

    dtype: torch.dtype
    alignment: int

    def data_ptr(self) -> int:
        return self.alignment

    @staticmethod
    def ptr_range() -> int:
        return 0


Arrange = Callable[[Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class TritonLaunch:
    """`kernel(*pointers, *scalars, **constants)` over `grid`; kernels take them in that order."""

    kernel: Any
    grid: tuple[int, ...]
    pointers: tuple[str, ...]
    scalars: tuple[int | float, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    alignment: int = 16

    def load(self, values: Mapping[str, Any], device: int) -> Callable[[Sequence[Any]], None]:
        arrange = self._arrangement(values)
        if device < 0:
            return self._interpreted(arrange)
        stand_ins = [
            None if values.get(n) is None else _Address(values[n].dtype, self.alignment)
            for n in self.pointers
        ]
        compiled = self.kernel.warmup(
            *stand_ins, *self.scalars, grid=self.grid, **self.constants, **self.options
        )
        run = compiled.run  # loads the kernel: before that it has no function
        fixed = (compiled.function, compiled.packed_metadata, None, None, None)
        return launcher(run, (*self.grid, 1, 1)[:3], device, fixed, arrange)

    def _interpreted(self, arrange: Arrange) -> Callable[[Sequence[Any]], None]:
        names = tuple(self.constants)

        def launch(tensors: Sequence[Any]) -> None:
            given = arrange(tensors)
            constants = dict(zip(names, given[len(given) - len(names) :], strict=True))
            self.kernel[self.grid](*given[: len(given) - len(names)], **constants, **self.options)

        return launch

    def _arrangement(self, values: Mapping[str, Any]) -> Arrange:
        """A function that orders addresses, None for absent ones, then scalars and constants."""
        present = [values.get(n) is not None for n in self.pointers]
        tail = (*self.scalars, *self.constants.values())
        if all(present):
            return lambda pointers: (*pointers, *tail)
        count = sum(present)
        where = iter(range(count))
        order = itemgetter(*(next(where) if there else count for there in present))
        return lambda pointers: order((*pointers, None)) + tail

    @property
    def options(self) -> dict[str, Any]:
        # name multiply-add fusion: Triton 3.10 turns it off by default
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }

    def cubin(self, values: Mapping[str, Any], capability: int) -> Any:
        """Compile for a GPU that need not be present; returns Triton's compiled kernel."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        names = self.kernel.arg_names
        given = [*(values.get(n) for n in self.pointers), *self.scalars]
        constants = dict(self.constants)
        signature = dict.fromkeys(constants, "constexpr")
        divisible = {}
        for i, (name, value) in enumerate(zip(names, given, strict=False)):
            if value is None:
                signature[name], constants[name] = "constexpr", None
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + _TYPES[value.dtype]
                if self.alignment % 16 == 0:
                    divisible[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not self.kernel.params[i].do_not_specialize:
                    divisible[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(
            self.kernel,
            signature={n: signature[n] for n in names},
            constexprs=constants,
            attrs=divisible,
        )
        return compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
}


def launcher(
    run: Any, grid: tuple[int, ...], device: int, fixed: tuple[Any, ...], arrange: Arrange
) -> Callable[[Sequence[int]], None]:
    """A launch through `run`, or directly through the driver function that `run` calls: the Python
    code before that call handles scratch memory, which our kernels do not use."""
    stream = torch_internals.raw_stream
    x, y, z = grid
    submit, middle, packed = _passed_on(run, grid, fixed)
    if packed:
        return lambda addresses: submit(x, y, z, stream(device), *middle, arrange(addresses))
    return lambda addresses: submit(x, y, z, stream(device), *middle, *arrange(addresses))


def _passed_on(
    run: Any, grid: tuple[int, ...], fixed: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...], bool]:
    """The function to call, its arguments between the stream and the kernel's arguments, and
    whether it takes those as one tuple. Their order differs between versions of Triton, so a copy
    of `run` is called once to see what it passes to its `launch`."""
    through_run = run, fixed, False
    sizes = (getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile"))
    if any(size != 0 for size in sizes) or getattr(run, "gsan_enabled", False):
        return through_run
    seen: list[Any] = []
    stream, arguments = object(), (object(), object())
    spy = copy.copy(run)
    spy.launch = lambda *passed: seen.extend(passed)
    spy(*grid, stream, *fixed, *arguments)
    if tuple(seen[:4]) != (*grid, stream):
        return through_run
    if tuple(seen[-2:]) == arguments:
        return run.launch, tuple(seen[4:-2]), False
    if seen[-1] == arguments:
        return run.launch, tuple(seen[4:-1]), True
    return through_run

"""Triton kernels: compiled once, then launched without Triton's Python dispatch.

`kernel[grid](...)` binds, specialises and looks up on every call (20 us on the H200 machine's CPU);
the compiled kernel's own `run` takes 8. A plan keeps it, so only addresses pass through Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from . import installed


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
    """Stands for a tensor of a dtype and alignment while Triton specialises a kernel."""

    dtype: torch.dtype
    alignment: int

    def data_ptr(self) -> int:
        return self.alignment

    @staticmethod
    def ptr_range() -> int:
        return 0


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

    def load(self, values: Mapping[str, Any], device: int) -> Callable[[list[Any]], None]:
        if device < 0:
            return self._interpreted(values)
        stand_ins = [
            None if values.get(n) is None else _Address(values[n].dtype, self.alignment)
            for n in self.pointers
        ]
        compiled = self.kernel.warmup(
            *stand_ins, *self.scalars, grid=self.grid, **self.constants, **self.options
        )
        grid = (*self.grid, 1, 1)[:3]
        run = compiled.run
        fixed = (compiled.function, compiled.packed_metadata, None, None, None)
        stream = torch._C._cuda_getCurrentRawStream
        arrange = self._arrangement(values)

        def launch(pointers: list[Any]) -> None:
            run(*grid, stream(device), *fixed, *arrange(pointers))

        return launch

    def _interpreted(self, values: Mapping[str, Any]) -> Callable[[list[Any]], None]:
        arrange = self._arrangement(values)
        names = tuple(self.constants)

        def launch(tensors: list[Any]) -> None:
            given = arrange(tensors)
            constants = dict(zip(names, given[len(given) - len(names) :], strict=True))
            self.kernel[self.grid](*given[: len(given) - len(names)], **constants, **self.options)

        return launch

    def _arrangement(self, values: Mapping[str, Any]) -> Callable[[list[Any]], tuple[Any, ...]]:
        """Puts addresses in order, None where there is none, then scalars and constants."""
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
        # multiply-add fusion by name: Triton 3.10 leaves it out by default
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
}

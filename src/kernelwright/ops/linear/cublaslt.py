"""cuBLASLt through ctypes: its algorithms for x @ weight^T + bias, and their launch.

cuBLASLt is column-major: a tensor [rows, width] is a matrix of `width` rows to it. So the GEMM is
out^T = weight @ x^T, with weight marked as transposed. This file knows addresses, not tensors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch

from . import configurations

# the alignment that cuBLASLt assumes by default; PyTorch allocates with it
ALIGNMENT = 256
# PyTorch's workspace on Hopper: which algorithms are returned depends on it
WORKSPACE = 32 << 20
ASKED = 24  # algorithms requested; about 8 are returned on an H200
# a service that keeps loading new weights starts over here instead of growing without bound
BIASES = 1024

# numbers from cublasLt.h and library_types.h
TYPES = {torch.float16: 2, torch.bfloat16: 14}
FLOAT32, SUM_IN_FLOAT32 = 0, 68
TRANSPOSE_FIRST, TRANSPOSE_SECOND, EPILOGUE, BIAS_ADDRESS = 3, 4, 7, 8
TRANSPOSED, ADD_BIAS, ADD_BIAS_AND_GELU = 1, 4, 36
MOST_WORKSPACE = 1

ONE, ZERO = ctypes.c_float(1), ctypes.c_float(0)


class Refused(Exception):
    """Why cuBLASLt cannot be used, or the error that it returned."""


class Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and its workspace in bytes."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Owned(c_void_p):
    """A handle of cuBLASLt that is destroyed when it is garbage collected."""


@dataclass(frozen=True)
class Shape:
    """x [rows, width] by weight [outputs, width], with their row strides in elements. `gelu`: its
    tanh form after the bias. One that lies `across` is in memory as its transpose, and its stride
    is that between columns."""

    rows: int
    outputs: int
    width: int
    x_stride: int
    weight_stride: int
    dtype: torch.dtype
    biased: bool
    gelu: bool = False
    x_across: bool = False
    weight_across: bool = False


def load() -> Any:
    """The library that torch itself uses."""
    if torch.version.cuda is None:
        raise Refused("this torch is built without CUDA")
    name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise Refused(f"{name} cannot be loaded: {error}") from error


class Library:
    """cuBLASLt on the GPU that is current at construction and has this capability."""

    def __init__(self, functions: Any, capability: tuple[int, int]) -> None:
        self.functions = functions
        # whether configurations that its heuristic does not return may be used
        self.asks = configurations.problem(functions, capability) is None
        self.handle = c_void_p()  # never destroyed; any thread may use it
        self.ask("cublasLtCreate", byref(self.handle))

    def ask(self, name: str, *arguments: Any) -> None:
        """Call a function; raises if its status is not success."""
        function = getattr(self.functions, name, None)
        status = function(*arguments) if function else None
        if status != 0:
            answer = "is missing" if function is None else f"answered with status {status}"
            raise Refused(f"{name} {answer}")

    def make(self, kind: str, *arguments: Any) -> Owned:
        made = Owned()
        self.ask(f"cublasLt{kind}Create", byref(made), *arguments)
        destroy = getattr(self.functions, f"cublasLt{kind}Destroy")
        finalize(made, destroy, c_void_p(made.value)).atexit = False
        return made

    def set(self, kind: str, thing: Owned, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self.ask(f"cublasLt{kind}SetAttribute", thing, attribute, byref(value), size)


class Product:
    """The descriptors of one GEMM."""

    def __init__(self, library: Library, shape: Shape) -> None:
        self.library = library
        self.biased = shape.biased
        self.epilogue = ADD_BIAS_AND_GELU if shape.gelu else ADD_BIAS
        kind = TYPES[shape.dtype]

        def layout(rows: int, columns: int, apart: int) -> Owned:
            sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(apart)
            return library.make("MatrixLayout", kind, *sizes)

        self.across = shape.weight_across, shape.x_across
        weight, x = (shape.width, shape.outputs), (shape.width, shape.rows)
        self.weight = layout(
            *(weight[::-1] if shape.weight_across else weight), shape.weight_stride
        )
        self.x = layout(*(x[::-1] if shape.x_across else x), shape.x_stride)
        self.out = layout(shape.outputs, shape.rows, shape.outputs)
        self._descriptions: dict[int, Owned] = {}

    def description(self, bias: int) -> Owned:
        """The descriptor of the operation. It holds the address of the bias, so each bias has one:
        a launch then changes nothing that another thread may be reading."""
        known = self._descriptions.get(bias)
        if known is None:
            known = self._describe(bias)
            if len(self._descriptions) >= BIASES:
                self._descriptions.clear()
            self._descriptions[bias] = known
        return known

    def _describe(self, bias: int) -> Owned:
        made = self.library.make("MatmulDesc", SUM_IN_FLOAT32, FLOAT32)
        weight_across, x_across = self.across
        attributes: dict[int, Any] = {}
        if not weight_across:
            attributes[TRANSPOSE_FIRST] = ctypes.c_int32(TRANSPOSED)
        if x_across:
            attributes[TRANSPOSE_SECOND] = ctypes.c_int32(TRANSPOSED)
        if self.biased:
            epilogue = ctypes.c_int32(self.epilogue)
            attributes |= {EPILOGUE: epilogue, BIAS_ADDRESS: c_void_p(bias)}
        for attribute, value in attributes.items():
            self.library.set("MatmulDesc", made, attribute, value)
        return made

    def algorithms(self, bias: int) -> list[Algorithm]:
        """Those that cuBLASLt's heuristic returns, PyTorch's choice first; before the others,
        configurations that are known to need little power."""
        named = self._named(bias)
        algorithms = [Algorithm(self, f) for f in named]
        if not self.library.asks:
            return algorithms
        functions = self.library.functions
        known = [a.configuration for a in algorithms]
        more: list[Algorithm] = []
        for other in configurations.MORE if known and known[0] else ():
            if other not in known:
                found = configurations.changed(functions, named[0], other)
                more += [] if found is None else self.again(found, bias)
        return [*algorithms[:1], *more, *algorithms[1:]]

    def torch_power(self, bias: int) -> float:
        """What PyTorch's choice, the first that the heuristic returns, loses at the power limit."""
        return next((Algorithm(self, found).power for found in self._named(bias)), 1.0)

    def again(self, found: Any, bias: int) -> list[Algorithm]:
        """An algorithm that was found for another GEMM, if it can compute this one."""
        checked = Found()
        functions = self.library.functions
        status = functions.cublasLtMatmulAlgoCheck(*self._asked(bias), byref(found), byref(checked))
        if status or checked.workspace > WORKSPACE:
            return []
        usable = Found.from_buffer_copy(found)
        usable.workspace = checked.workspace
        return [Algorithm(self, usable)]

    def _asked(self, bias: int) -> tuple[Any, ...]:
        """The leading arguments of every query about this GEMM."""
        return (
            self.library.handle,
            self.description(bias),
            self.weight,
            self.x,
            self.out,
            self.out,
        )

    def _named(self, bias: int) -> list[Found]:
        preference = self.library.make("MatmulPreference")
        most = ctypes.c_size_t(WORKSPACE)
        self.library.set("MatmulPreference", preference, MOST_WORKSPACE, most)
        found, count = (Found * ASKED)(), ctypes.c_int()
        self.library.ask(
            "cublasLtMatmulAlgoGetHeuristic",
            *self._asked(bias),
            preference,
            ASKED,
            found,
            byref(count),
        )
        return [f for f in found[: count.value] if f.status == 0]


class Algorithm:
    """One algorithm for a GEMM. `workspace`: the bytes that a launch has to provide.
    `configuration`: that of its kernel, if it is Hopper's; `power`: what that loses at the GPU's
    power limit. Both are read only from a cuBLASLt whose numbers are known."""

    def __init__(self, product: Product, found: Found) -> None:
        self._product, self.found = product, found
        self.workspace: int = found.workspace
        functions, known = product.library.functions, product.library.asks
        self.configuration = configurations.of(functions, found) if known else None
        self.power = configurations.power(self.configuration) if known else 1.0
        # argument blocks that no launch uses now: two threads never fill the same one
        self._free: list[tuple[tuple[c_void_p, ...], Callable[[], int]]] = []

    def launch(self, x: int, weight: int, bias: int, out: int, workspace: int, stream: int) -> int:
        """Launch it on a stream with these addresses; returns cuBLASLt's status, 0 for success."""
        description = self._product.description(bias)
        try:
            places, submit = self._free.pop()
        except IndexError:
            places, submit = self._submission()
        described, weight_at, x_at, out_at, workspace_at, on = places
        described.value = description.value
        weight_at.value = weight
        x_at.value = x
        out_at.value = out
        workspace_at.value = workspace
        on.value = stream
        status = submit()
        self._free.append((places, submit))
        return status

    def _submission(self) -> tuple[tuple[c_void_p, ...], Callable[[], int]]:
        """The arguments that change between launches, and the call that reads them. Converting all
        sixteen arguments for each launch takes ctypes 1.5 times as long."""
        p = self._product
        places = tuple(c_void_p() for _ in range(6))
        described, weight, x, out, workspace, stream = places
        submit = functools.partial(
            p.library.functions.cublasLtMatmul,
            p.library.handle,
            described,
            byref(ONE),
            weight,
            p.weight,
            x,
            p.x,
            byref(ZERO),
            out,
            p.out,
            out,
            p.out,
            byref(self.found),  # its algorithm is its first field
            workspace,
            ctypes.c_size_t(self.workspace),
            stream,
        )
        return places, submit

"""CUDA C++ kernels: `.cuh` templates compiled by NVRTC, cached on disk, launched by the driver.

No nvcc, no torch headers, nothing to build at install time. A launch names a template of an op's
`cuda.cuh`; a one-line entry point instantiates it for one dtype, width and policy.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import io
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import torch_internals
from .cache import KernelCache
from .launch import installed

PACKAGE = Path(__file__).resolve().parents[1]
OPTIONS = ("std=c++17",)
# names that also resolve outside the namespace kernelwright
TYPES = {torch.float16: "half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
_building: dict[str, threading.Lock] = {}  # of kernels that are being compiled
# While it is imported, cuda.core replaces its own __spec__, by which Python tells that a module is
# not ready: another thread would get it unfinished (cuda-core 1.2.2).
_importing = threading.Lock()


def problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"tensors are on {device.type}, CUDA kernels need a CUDA GPU"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not (installed("cuda") and installed("cuda.core")):
        return "cuda-core is not installed (pip install 'kernelwright[cuda]')"
    if not include_paths():
        return "cuda_bf16.h was not found; install triton or nvidia-cuda-runtime"
    return None


@dataclass(frozen=True)
class CudaLaunch:
    """`template(args)` of `source` with `block` threads over `grid`.

    `source` is relative to this package, or the absolute path of a header of another package.
    Kernels take one struct: the pointers first, then `scalars` packed by `layout` (struct module
    letters, native alignment), so a hot launch rewrites only the stream and the pointers.

    `resident`: so many blocks on a multiprocessor are enough. Without it the compiler takes few
    registers, and delays loads that could be under way together.

    `shared`: bytes of shared memory beside what the kernel declares. `of_architecture`: it uses
    instructions that only the GPU's own architecture has, not later ones (sm_90a).
    """

    source: str
    template: str
    arguments: str
    grid: int
    block: int
    pointers: tuple[str, ...]
    layout: str
    scalars: tuple[int | float, ...]
    alignment: int = 16
    resident: int = 0
    shared: int = 0
    of_architecture: bool = False

    @property
    def entry(self) -> str:
        """The kernel's name, as profilers show it: kernelwright_row, kernelwright_rope, ..."""
        return f"kernelwright_{Path(self.source).parent.name}"

    @property
    def code(self) -> str:
        """The whole translation unit: the op's header and one entry point."""
        bounds = f"{self.block}, {self.resident}" if self.resident else self.block
        return (
            f'#include "{self.source}"{_edition(self.source)}\n'
            f'extern "C" __global__ void __launch_bounds__({bounds})\n'
            f"{self.entry}(const __grid_constant__ {self.arguments} args) "
            f"{{ {self.template}(args); }}\n"
        )

    def load(self, values: Mapping[str, Any], device: int) -> Callable[[Sequence[int]], None]:
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}" + "a" * self.of_architecture
        cubin = compile_cubin(self.code, arch)
        function = _function(device, cubin, self.entry, self.shared)
        config = struct.pack(CONFIG, self.grid, 1, 1, self.block, 1, 1, self.shared, 0, 0, 0)
        arguments = struct.pack(
            f"@{len(self.pointers)}P{self.layout}0q", *[0] * len(self.pointers), *self.scalars
        )
        # what changes between launches: the stream and, after two zero words, the pointers. an
        # absent pointer is skipped as padding and stays zero
        present = (values.get(n) is not None for n in self.pointers)
        changes = "@P16x" + "".join("P" if there else "8x" for there in present)
        fill = struct.Struct(changes).pack_into
        stream = torch_internals.raw_stream
        # parameter blocks that no launch uses now: two threads never fill the same one
        free: list[tuple[Any, Callable[[], int]]] = []

        def launch(addresses: Sequence[int]) -> None:
            try:
                parameters, submit = free.pop()
            except IndexError:
                parameters, submit = _submission(function, config, arguments)
            fill(parameters, STREAM, stream(device), *addresses)
            status = submit()
            if status == INVALID_CONTEXT:  # this thread has not used CUDA yet
                torch.cuda.set_device(device)
                status = submit()
            free.append((parameters, submit))
            if status:
                check(status, f"launch of {self.template}")

        return launch


INVALID_CONTEXT = 201
DYNAMIC_SHARED = 8  # the attribute of a function: bytes of shared memory that a launch may ask for
# CUlaunchConfig: grid, block, shared memory, stream, no attributes
CONFIG = "@7IPPI0P"
STREAM = struct.calcsize("@7I0P")


def _submission(function: int, config: bytes, arguments: bytes) -> tuple[Any, Callable[[], int]]:
    """A launch's parameters, and the driver call that reads them. cuLaunchKernelEx reads them from
    memory; converting cuLaunchKernel's eleven arguments takes ctypes longer than the launch takes
    the driver."""
    parameters = ctypes.create_string_buffer(config + arguments)
    begin, size = ctypes.addressof(parameters), ctypes.c_size_t(len(arguments))
    pointer, length, end = 1, 2, 0
    extra = (ctypes.c_void_p * 5)(pointer, begin + len(config), length, ctypes.addressof(size), end)
    where = map(ctypes.c_void_p, (begin, function, None, ctypes.addressof(extra)))
    submit: Any = functools.partial(driver().cuLaunchKernelEx, *where)
    submit.kept = extra, size
    return parameters, submit


@functools.lru_cache
def driver() -> Any:
    """libcuda, called with the GIL held: a launch takes less time than releasing the GIL."""
    library = ctypes.PyDLL("libcuda.so.1")
    p = ctypes.c_void_p
    library.cuModuleLoadData.argtypes = [p, ctypes.c_char_p]
    library.cuModuleGetFunction.argtypes = [p, p, ctypes.c_char_p]
    library.cuFuncSetAttribute.argtypes = [p, ctypes.c_int, ctypes.c_int]
    library.cuGetErrorString.argtypes = [ctypes.c_int, p]
    return library


def check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"kernelwright: {what} failed: {(text.value or b'?').decode()}")


@functools.cache
def _function(device: int, cubin: bytes, name: str, shared: int) -> int:
    """The loaded kernel, which may use so much shared memory. Modules are never unloaded: CUDA
    graphs may hold them."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.set_device(torch.cuda.current_device())
    check(driver().cuModuleLoadData(ctypes.byref(module), cubin), "loading a kernel")
    found = driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    check(found, f"lookup of {name}")
    if shared:
        allowed = driver().cuFuncSetAttribute(function, DYNAMIC_SHARED, shared)
        check(allowed, f"{shared} bytes of shared memory for {name}")
    assert function.value is not None
    return function.value


@functools.lru_cache
def include_paths() -> tuple[str, ...]:
    """The folder of `cuda_bf16.h`: in the CUDA wheels of torch, in Triton, or in CUDA_HOME."""
    found: list[Path] = []
    for package, places in (("nvidia", ("*/include",)), ("triton", ("backends/nvidia/include",))):
        if installed(package):
            import importlib.util

            spec = importlib.util.find_spec(package)
            for root in (spec.submodule_search_locations or ()) if spec else ():
                for place in places:
                    found += [p for p in Path(root).glob(place) if (p / "cuda_bf16.h").is_file()]
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if (Path(home) / "include/cuda_bf16.h").is_file():
        found.append(Path(home) / "include")
    return tuple(str(p) for p in found[:1])


def _edition(source: str) -> str:
    """A comment with a hash of the headers beside another package's source. Our own headers are
    part of every cache key; this puts theirs into it."""
    if not os.path.isabs(source):
        return ""
    digest = hashlib.sha256()
    for header in sorted(Path(source).parent.glob("*.cuh")):
        digest.update(header.read_bytes())
    return f"  // {digest.hexdigest()[:16]}"


def headers() -> dict[str, str]:
    """Every `.cuh` of the package by its include name."""
    return {str(p.relative_to(PACKAGE)): p.read_text() for p in sorted(PACKAGE.rglob("*.cuh"))}


@functools.lru_cache
def nvrtc_version() -> tuple[int, int] | None:
    """The version of the compiler, or None if there is none."""
    if not (installed("cuda") and installed("cuda.bindings")):
        return None
    from cuda.bindings import nvrtc

    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError:  # the library itself was not found
        return None
    return None if int(status) else (major, minor)


@functools.lru_cache
def fingerprint() -> str:
    """A digest of what every kernel is compiled from and by, except for its own source: the headers
    have 130 kB, and each kernel of a block asks for its key."""
    major, minor = nvrtc_version() or (0, 0)
    sources = "".join(f"{name}\0{text}\0" for name, text in headers().items())
    return KernelCache.key(f"{major}.{minor}", str(OPTIONS), sources)


def compile_cubin(code: str, arch: str) -> bytes:
    """The cubin of a translation unit, from the disk cache or from NVRTC. Threads compile different
    kernels side by side: a block has dozens, and each takes a tenth of a second."""
    cache = KernelCache.default()
    key = cache.key(fingerprint(), arch, code)
    cubin = cache.read(key)
    if cubin is None:
        with _building.setdefault(key, threading.Lock()):
            cubin = cache.read(key)
            if cubin is None:
                cubin, _ = build(code, arch)
                cache.write(key, cubin)
        _building.pop(key, None)
    return cubin


def build(code: str, arch: str, verbose: bool = False) -> tuple[bytes, str]:
    """Compile now; returns the cubin and, if `verbose`, the assembler's resource report."""
    with _importing:
        from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        include_path=[str(PACKAGE), *include_paths()],
        ptxas_options=["-v"] if verbose else None,
    )
    log = io.StringIO()
    try:
        cubin = Program(code, "c++", options).compile("cubin", logs=log)
    except Exception as error:
        raise RuntimeError(f"kernelwright: NVRTC could not compile for {arch}\n{error}") from error
    return bytes(cubin.code), log.getvalue()

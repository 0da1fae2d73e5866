"""Runs CUDA C++ kernels without a GPU: g++ compiles them, and the threads of a block take turns.

A wrong formula, mask, stride, vector width or `layout` shows as it would on a GPU. What a GPU alone
can show stays unseen: a missing barrier (threads run in order), the bits of its own functions (expf
is the host's here), and anything about speed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends import Unsupported, cuda
from ..backends.cuda import CudaLaunch
from ..errors import CannotRun
from ..ops.case import Inputs
from ..ops.op import Op
from ..ops.plan import Call
from .op_cases import DTYPES, small
from .planned_kernels import TARGETS

GPU = Path(__file__).with_name("emulated_gpu.hpp")
# headers that are PTX throughout, and what stands in for each
EMULATED = {"ops/fp8_attention/hopper.cuh": Path(__file__).with_name("emulated_hopper.hpp")}
FLAGS = ("-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC", "-shared")
# elements around an output that no kernel may write to
GUARD = 64
UNWRITTEN = 85  # of integers, where floats have NaN
SECONDS = 60


def problem() -> str | None:
    """Why kernels cannot be emulated here, or None."""
    return None if shutil.which("g++") else "g++ is not installed"


class Emulator:
    """The kernels of these launches in one library: compiling them together is several times as
    fast. Raises CannotRun if g++ does not take them, such as for PTX in asm."""

    def __init__(self, launches: Iterable[CudaLaunch]) -> None:
        found = {launch.code: launch for launch in launches}
        self._number = {code: i for i, code in enumerate(found)}
        self._folder = tempfile.TemporaryDirectory(prefix="kernelwright-emulated-")
        source, library = (Path(self._folder.name) / n for n in ("kernels.cpp", "kernels.so"))
        source.write_text(GPU.read_text(encoding="utf-8") + _unit(found.values()))
        done = subprocess.run(
            ["g++", *FLAGS, "-o", library, source], capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = next((x for x in done.stderr.splitlines() if "error" in x), "no word")
            raise CannotRun(f"g++ does not compile it: {said.partition('error: ')[2] or said}")
        self._library = ctypes.CDLL(str(library))

    def run(self, launch: CudaLaunch, values: Mapping[str, Any], outputs: Sequence[str]) -> None:
        """Launch on CPU tensors. In a child process, which a wrong address ends; it hands the
        memory of the outputs back in a file."""
        given = [values.get(n) if n else None for n in launch.pointers]
        places = [0 if t is None else t.data_ptr() for t in given]
        packed = struct.pack(f"@{len(places)}P{launch.layout}0q", *places, *launch.scalars)
        start = getattr(self._library, f"launch{self._number[launch.code]}")
        memory = [values[n].untyped_storage() for n in outputs]
        views = [(ctypes.c_char * s.nbytes()).from_address(s.data_ptr()) for s in memory]
        with tempfile.TemporaryFile() as file:
            child = os.fork()
            if child == 0:
                faulthandler.disable()
                signal.alarm(SECONDS)
                status = start(packed, len(packed), launch.grid, launch.block)
                for view in views:
                    os.write(file.fileno(), view)
                os._exit(status)
            _, status = os.waitpid(child, 0)
            file.seek(0)
            for view in views:
                file.readinto(view)
        if os.WIFSIGNALED(status):
            if os.WTERMSIG(status) == signal.SIGALRM:
                raise AssertionError(f"the kernel did not end within {SECONDS} s")
            if os.WTERMSIG(status) == signal.SIGABRT:
                raise AssertionError("the kernel called __trap()")
            raise AssertionError(
                "the kernel used a wrong address: compare the struct in cuda.cuh with `pointers`, "
                "`layout` and `scalars` in cuda.py"
            )
        if os.WEXITSTATUS(status):
            raise AssertionError(
                f"cuda.py packs {len(packed)} bytes, {launch.arguments} has another size: compare "
                f"its fields with `pointers` and `layout`"
            )


def _unit(launches: Iterable[CudaLaunch]) -> str:
    """One translation unit with a function launch0, launch1, ... for each launch."""
    parts, seen = [], set[str]()
    for number, launch in enumerate(launches):
        parts.append(included(f'#include "{launch.source}"', seen))
        name = f"kernel{number}"
        entry = launch.code.partition("\n")[2].replace(f"{launch.entry}(", f"{name}(")
        parts.append(
            f"{entry}"
            f'extern "C" int launch{number}(const void* packed, size_t size, int g, int b)'
            f"{{ static {launch.arguments} args; if (size != (sizeof args + 7) / 8 * 8) return 1;"
            f"  memcpy(&args, packed, sizeof args); launch_blocks([] {{ {name}(args); }}, g, b);"
            f"  return 0; }}\n"
        )
    return "\n".join(parts)


def included(text: str, seen: set[str]) -> str:
    """The text with each header in it once, and without what g++ cannot assemble."""
    ours = cuda.headers()

    def header(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        if name in EMULATED:
            include = '#include "backends/common.cuh"'
            own = f"{include}\nnamespace kernelwright {{\n{EMULATED[name].read_text()}\n}}"
        else:
            own = ours[name] if name in ours else Path(name).read_text(encoding="utf-8")
        return re.sub(r'#include "([^"]+)"', header, own)

    text = re.sub(r'#include "([^"]+)"', header, text)
    text = re.sub(r"#include <cuda_.*|#pragma once", "", text)
    text = text.replace("const size_t at = __cvta_generic_to_global(p);", "")
    text = re.sub(r'asm\("cvt.rn.satfinite.e4m3x2.*?\);', "pair = e4m3_pair(low, high);", text)
    return re.sub(r"asm volatile\(.*?\);", "*p = value;", text)


def planned(
    op: Op, arguments: Mapping[str, Any], exact: str | None = None
) -> tuple[CudaLaunch, dict[str, Any]] | None:
    """The launch of a call on the CPU, and its values by name: arguments with dense rows, and
    outputs full of NaN. None without elements; raises Unsupported as `plan` does."""
    given = {n: _dense(a) if isinstance(a, Tensor) else a for n, a in arguments.items()}
    outputs = [_guarded(t) for t in op.allocate(*(given[n] for n in op.arguments))]
    values = given | dict(zip(op.outputs, outputs, strict=True))
    if not any(o.numel() for o in outputs):
        return None
    bits = functools.reduce(or_, (t.data_ptr() for t in values.values() if isinstance(t, Tensor)))
    alignment = min(16, bits & -bits)
    call = Call(values, op=op.name, exact=exact, target=TARGETS["sm_90"], alignment=alignment)
    launch = op.kernels.cuda(call)
    assert isinstance(launch, CudaLaunch)
    return launch, values


def compiled(op: Op, calls: Iterable[tuple[Mapping[str, Any], str | None]]) -> Emulator:
    """An emulator with the kernels of these calls, (arguments, exact) each."""
    launches = []
    for arguments, exact in calls:
        try:
            found = planned(op, arguments, exact)
        except Unsupported:
            continue
        if found is not None:
            launches.append(found[0])
    if not launches:
        raise CannotRun("no case has a kernel in CUDA C++")
    return Emulator(launches)


class WhenAsked:
    """The kernels of the small cases of an op, compiled when the first one runs."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._made: Emulator | None = None

    def run(self, launch: CudaLaunch, values: Mapping[str, Any], outputs: Sequence[str]) -> None:
        if self._made is None:
            self._made = of_small_cases(self._op)
        self._made.run(launch, values, outputs)


def of_small_cases(op: Op) -> Emulator:
    """An emulator with the kernels of all small cases, in all dtypes and exact modes."""
    return compiled(
        op,
        [
            (case.arguments(Inputs(dtype)), exact)
            for case in small(op)
            for dtype in DTYPES
            for exact in (None, *op.exact)
        ],
    )


def emulated(
    emulator: Emulator | WhenAsked, op: Op, arguments: Mapping[str, Any], exact: str | None = None
) -> tuple[Tensor, ...] | None:
    """The outputs of the CUDA kernel, None if it does not support the call. Arguments that the op
    writes to are written to."""
    try:
        found = planned(op, arguments, exact)
    except Unsupported:
        return None
    if found is None:
        return tuple(op.allocate(*(arguments[n] for n in op.arguments)))
    launch, values = found
    emulator.run(launch, values, (*op.outputs, *op.writes))
    outputs = tuple(values[n] for n in op.outputs)
    for name, out in zip(op.outputs, outputs, strict=True):
        whole = out.new_empty(0).set_(out.untyped_storage())
        edges = torch.cat((whole[:GUARD].float(), whole[-GUARD:].float()))
        left = edges.isnan() if whole.is_floating_point() else edges == UNWRITTEN
        assert left.all(), f"the kernel wrote outside of {name}"
    return outputs


def _dense(t: Tensor) -> Tensor:
    gaps = t.ndim > 0 and t.shape[-1] > 1 and t.stride(-1) != 1
    return t.contiguous() if gaps else t


def _guarded(like: Tensor) -> Tensor:
    """Memory full of NaN of this layout, or of UNWRITTEN, between guards."""
    strides = (s * (n - 1) for s, n in zip(like.stride(), like.shape, strict=True))
    size = 1 + sum(strides) if like.numel() else 0
    value = math.nan if like.is_floating_point() else UNWRITTEN
    whole = torch.full((size + 2 * GUARD,), value, dtype=like.dtype)
    return whole.as_strided(like.shape, like.stride(), GUARD)

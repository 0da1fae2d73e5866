"""Compiles the kernels of an op for every target: registers and spills of each."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..backends import cuda
from ..errors import CannotRun
from ..ops.op import Op, registry
from .planned_kernels import TARGETS, Kernel, Usage, kernels, usage

# kernels in one translation unit
TOGETHER = 48
ALL, LARGEST = "all", "largest"


@dataclass(frozen=True)
class Cubin:
    """What ptxas reports of one kernel on one architecture."""

    backend: str
    arch: str
    kernel: str
    used: Usage


def cubins(
    op: Op, backend: str, targets: Sequence[str] = tuple(TARGETS), all_cases: bool = False
) -> list[Cubin]:
    """Compile the op's largest case in each dtype, or all cases, for the targets; raises CannotRun
    with the compiler's message if one fails."""
    if backend == "cuda":
        found = []
        for arch in targets:
            every = wanted(op, backend, arch, all_cases)
            for start in range(0, len(every), TOGETHER):
                found += _by_nvrtc(every[start : start + TOGETHER], arch)
        return found
    return _by_triton(op, targets, all_cases)


def wanted(op: Op, backend: str, arch: str, all_cases: bool) -> list[Kernel]:
    """The distinct kernels to compile; Triton has no bfloat16 on sm_75."""
    found = kernels(backend, arch, all_cases, ops=[op])
    if backend == "triton":
        return [k for k in found if arch != "sm_75" or k.dtype != torch.bfloat16]
    return list({k.launch.code: k for k in found}.values())


def _by_nvrtc(found: Sequence[Kernel], arch: str) -> list[Cubin]:
    try:
        report = cuda.build(together(found), arch, verbose=True)[1]
    except ImportError:
        raise CannotRun("cuda-core is not installed: pip install 'kernelwright[cuda]'") from None
    except RuntimeError as error:
        said = str(error).splitlines()
        # without a line of the compiler it did not run: the reason is the whole message
        reasons = [x for x in said[1:] if "error" in x] or said[1:]
        raise CannotRun("; ".join([said[0], *reasons][:3])) from None
    seen = usage(report)
    if len(seen) != len(found):
        raise CannotRun(f"{len(found)} kernels were compiled, ptxas reports {len(seen)}")
    return [
        Cubin("cuda", arch, found[int(used.entry.removeprefix("entry"))].name, used)
        for used in seen
    ]


def together(found: Sequence[Kernel]) -> str:
    """One translation unit of several kernels, entry0, entry1, ...: NVRTC takes as long to parse
    CUDA's headers as to compile two kernels."""
    includes = {k.launch.code.partition("\n")[0]: None for k in found}
    bodies = [
        k.launch.code.partition("\n")[2].replace(f"{k.launch.entry}(", f"entry{i}(")
        for i, k in enumerate(found)
    ]
    sizes = dict.fromkeys(map(_size_assertion, (k.launch for k in found)))
    return "\n".join((*includes, *sizes, *bodies))


def _size_assertion(launch: Any) -> str:
    """C++ that does not compile if the struct is not as large as what cuda.py packs."""
    size = struct.calcsize(f"@{len(launch.pointers)}P{launch.layout}0q")
    return (
        f"static_assert((sizeof({launch.arguments}) + 7) / 8 * 8 == {size}, "
        f'"cuda.py packs {size} bytes by its pointers and layout, this struct has another size");'
    )


def _by_triton(op: Op, targets: Sequence[str], all_cases: bool) -> list[Cubin]:
    """In a new process: a process in which Triton interprets kernels cannot compile them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
        environment |= {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            # ptxas runs, and reports, only for kernels that are not in Triton's cache
            "TRITON_CACHE_DIR": folder,
            "TRITON_DUMP_PTXAS_LOG": "1",
        }
        cases = ALL if all_cases else LARGEST
        done = subprocess.run(
            [sys.executable, "-m", __name__, op.check.__module__, op.name, cases, *targets],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no word"]
        raise CannotRun(f"Triton could not compile it: {said[-1]}")
    return [
        Cubin("triton", arch, name, Usage(**used)) for arch, name, used in json.loads(done.stdout)
    ]


def main(module: str, name: str, cases: str, *targets: str) -> None:
    """Print the resources of an op's Triton kernels as JSON; `module` declares the op."""
    importlib.import_module(module)
    op = registry()[name]
    assert isinstance(op, Op)
    compiled: list[tuple[str, str, dict[str, Any]]] = []
    for arch in targets:
        major, minor = TARGETS[arch].capability
        before, planned = len(compiled), wanted(op, "triton", arch, cases == ALL)
        for k in planned:
            try:
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    k.launch.cubin(k.call, 10 * major + minor)
            except Exception as error:
                reason = (str(error).strip().splitlines() or [""])[-1]
                sys.exit(f"{k.name} for {arch}: {type(error).__name__}: {reason}")
            # cases may share a kernel, of which ptxas reports once
            compiled += [(arch, k.name, asdict(used)) for used in usage(said.getvalue())]
        if planned and len(compiled) == before:
            sys.exit(f"ptxas reports none of {len(planned)} kernels for {arch}")
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])

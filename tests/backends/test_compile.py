"""Kernels compile for every GPU we name, and spill no register on any."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chosen import every_argument
from declared import OPS
from everything import EVERYTHING, share
from planned import TARGETS, kernels, usage
from triton_cubins import ARCHITECTURES

from kernelwright.backends import cuda
from kernelwright.checking.cubins import together

pytestmark = pytest.mark.slow
# kernels of one translation unit
TOGETHER = 48
# kernels are dealt out to as many tests, for as many cores
CUDA_PARTS = 2


def spilled(found, arch):
    """Compile by NVRTC, several at once; the kernels that use the stack, with the report."""
    bad = []
    for start in range(0, len(found), TOGETHER):
        part = found[start : start + TOGETHER]
        _, report = cuda.build(together(part), arch, verbose=True)
        seen = usage(report)
        assert len(seen) == len(part), report
        for used in seen:
            kernel = part[int(used.entry.removeprefix("entry"))]
            if not used.clean:
                bad.append(f"{kernel.name}: {used}, {kernel.launch.template}")
    return bad


def distinct(found):
    return list({k.launch.code: k for k in found}.values())


@functools.cache
def on_hopper():
    """The largest of each op, chain and dtype, and of the others every template argument, in
    bfloat16 and float32; float16 is bfloat16 with other conversions."""
    largest = list(kernels("cuda", "sm_90", everything=False))
    others = kernels("cuda", "sm_90", everything=True)
    others = [k for k in others if k.dtype != torch.float16]
    if EVERYTHING:
        return distinct([*largest, *others])
    return every_argument(others, first=[k for k in largest if k.dtype != torch.float16])


@pytest.mark.parametrize("part", range(CUDA_PARTS))
def test_no_cuda_kernel_spills_on_hopper(part):
    pytest.importorskip("cuda.core")
    found = on_hopper()
    assert {k.call.op for k in found} == {op.name for op in OPS if "cuda" in op.backends}
    assert not spilled(share(found[part::CUDA_PARTS], 2), "sm_90")


OTHERS = [arch for arch in TARGETS if arch != "sm_90"]


@pytest.mark.parametrize("arch", OTHERS)
def test_no_cuda_kernel_spills_on(arch):
    """The largest of each op and chain; each kernel on every third of these GPUs, in turns."""
    pytest.importorskip("cuda.core")
    half = torch.float16 if arch == "sm_75" else torch.bfloat16
    found = [k for k in kernels("cuda", arch, everything=False) if k.dtype == half]
    assert {k.call.op for k in found} == {op.name for op in OPS if "cuda" in op.backends}
    assert not spilled(share(distinct(found), 3, start=OTHERS.index(arch)), arch)


def test_no_triton_kernel_spills_on_any_gpu(tmp_path):
    """In an interpreter of its own: here kernels are interpreted, and cannot be compiled."""
    pytest.importorskip("triton")
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DUMP_PTXAS_LOG": "1",
    }
    script = Path(__file__).with_name("triton_cubins.py")
    done = subprocess.run(
        [sys.executable, script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert {name.partition(":")[0] for name, _ in reports} == set(ARCHITECTURES)
    bad = []
    for name, report in reports:
        (used,) = usage(report)
        if not used.clean:
            bad.append(f"{name}: {used}")
    assert not bad


FIRST_OF_ALL = """
from concurrent.futures import ThreadPoolExecutor
from kernelwright.backends import cuda
texts = [f'extern "C" __global__ void k{i}() {{}}' for i in range(8)]
with ThreadPoolExecutor(len(texts)) as pool:
    list(pool.map(lambda text: cuda.build(text, "sm_90"), texts))
"""


def test_the_first_kernels_of_a_process_compile_side_by_side():
    """In a process of its own: one that has imported cuda.core before has no race to lose."""
    pytest.importorskip("cuda.core")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FIRST_OF_ALL], env=environment, check=True)


def test_older_compilers_take_our_lambdas():
    """NVRTC 13.0 takes a lambda with `auto` in its parameters for a function of the host."""
    for name, text in cuda.headers().items():
        assert not re.search(r"\]\s*\([^()]*\bauto\b", text), name

"""Every kernel compiles for every GPU we name, and spills no register on any."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from declared import OPS
from planned import TARGETS, kernels, usage

from kernelwright.backends import cuda

pytestmark = pytest.mark.slow
# kernels of one translation unit: parsing CUDA's headers takes NVRTC as long as two kernels do
TOGETHER = 24


def spilled(found, arch):
    """Compile by NVRTC, several at once; the kernels that use the stack, with the report."""
    bad = []
    for start in range(0, len(found), TOGETHER):
        part = found[start : start + TOGETHER]
        includes = {k.launch.code.partition("\n")[0]: None for k in part}
        bodies = [
            k.launch.code.partition("\n")[2].replace(f"{k.launch.entry}(", f"entry{i}(")
            for i, k in enumerate(part)
        ]
        _, report = cuda.build("\n".join((*includes, *bodies)), arch, verbose=True)
        seen = usage(report)
        assert len(seen) == len(part), report
        for used in seen:
            kernel = part[int(used.entry.removeprefix("entry"))]
            if not used.clean:
                bad.append(f"{kernel.name}: {used}, {kernel.launch.template}")
    return bad


def distinct(found):
    return list({k.launch.code: k for k in found}.values())


@pytest.mark.parametrize("op", [op.name for op in OPS if "cuda" in op.backends])
def test_no_cuda_kernel_of_an_op_spills_on_hopper(op):
    pytest.importorskip("cuda.core")
    found = [k for k in kernels("cuda", "sm_90", everything=True) if k.call.op == op]
    assert found
    assert not spilled(distinct(found), "sm_90")


@pytest.mark.parametrize("arch", [a for a in TARGETS if a != "sm_90"])
def test_no_cuda_kernel_spills_on(arch):
    pytest.importorskip("cuda.core")
    half = torch.float16 if arch == "sm_75" else torch.bfloat16
    found = [k for k in kernels("cuda", arch, everything=False) if k.dtype == half]
    assert {k.call.op for k in found} == {op.name for op in OPS if "cuda" in op.backends}
    assert not spilled(distinct(found), arch)


PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_no_triton_kernel_spills_on_any_gpu(part, tmp_path):
    """In an interpreter of its own: here kernels are interpreted, and cannot be compiled."""
    pytest.importorskip("triton")
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DUMP_PTXAS_LOG": "1",
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("triton_cubins.py"), str(part), str(PARTS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert reports
    bad = []
    for name, report in reports:
        (used,) = usage(report)
        if not used.clean:
            bad.append(f"{name}: {used}")
    assert not bad

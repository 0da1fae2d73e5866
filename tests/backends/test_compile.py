"""Every kernel compiles for every GPU we name, and spills no register on any."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from declared import OPS
from planned import TARGETS, kernels

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
            k.launch.code.partition("\n")[2].replace("entry(", f"entry{i}(")
            for i, k in enumerate(part)
        ]
        _, report = cuda.build("\n".join((*includes, *bodies)), arch, verbose=True)
        seen = re.findall(
            r"Compiling entry function 'entry(\d+)'(?:.*\n)+?"
            r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
            r".*?Used (\d+) registers",
            report,
        )
        assert len(seen) == len(part), report
        for number, stack, stores, loads, registers in seen:
            if stack != "0" or stores != "0" or loads != "0":
                bad.append(
                    f"{part[int(number)].name}: {stack} bytes of stack, {stores} spilled, "
                    f"{registers} registers, {part[int(number)].launch.template}"
                )
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
    found = list(kernels("cuda", arch, everything=False))
    assert {k.call.op for k in found} == {op.name for op in OPS if "cuda" in op.backends}
    assert not spilled(distinct(found), arch)


PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_no_triton_kernel_spills_on_any_gpu(part):
    """In an interpreter of its own: here kernels are interpreted, and cannot be compiled."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("triton_cubins.py")
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, script, str(part), str(PARTS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert compiled
    spilled = [k for k in compiled if "STACK:0" not in k[1] or "LOCAL:0" not in k[1]]
    assert not spilled

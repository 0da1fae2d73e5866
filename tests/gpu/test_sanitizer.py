"""compute-sanitizer over every CUDA kernel on small shapes: no bad access, no race."""

import os
import shutil
import subprocess
import sys

import pytest

SANITIZER = shutil.which("compute-sanitizer")
PROGRAM = """
import torch
from kernelwright.backends import Unsupported
from kernelwright.ops.case import Inputs
from kernelwright.ops.op import Op, registry
wanted, ran = set(), set()
for op in registry().values():
    if not isinstance(op, Op) or "cuda" not in op.backends:
        continue
    inputs = Inputs(torch.bfloat16, "cuda")
    given = [case.arguments(inputs) for case in op.cases if not case.large]
    for exact in (None, *op.exact):
        wanted.add((op.name, exact))
        # an order may need operands of its own, such as tables in the dtype of the rows
        own = [op.sized(inputs, 6, 64, exact)] if exact else []
        for arguments in (*given, *own):
            try:
                op.call(arguments, backend="cuda", exact=exact)
            except ValueError as error:
                # no kernel for this order; any other error is one
                if not isinstance(error.__cause__, Unsupported):
                    raise
                continue
            ran.add((op.name, exact))
assert ran == wanted, f"no kernel of {sorted(map(str, wanted - ran))} ran"
for width, rows in ((2048, 1), (2048, 5), (2048, 12), (2048, 40), (5120, 33)):
    for chain in ("torch", "diffusers"):
        given = registry()["rmsnorm"].sized(Inputs(torch.bfloat16, "cuda"), rows, width, chain)
        registry()["rmsnorm"].call(given, backend="cuda", exact=chain)
torch.cuda.synchronize()
print("ran")
"""


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_cuda_kernels_are_clean(tool):
    # without the caching allocator every tensor is an allocation of its own, so that a step past
    # its end is a bad access and not a neighbour's memory
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "ran" in done.stdout
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-500:]

"""Compile the Triton kernels and print, as JSON, the assembler's report of each.

python triton_cubins.py PART PARTS: the kernels are dealt out to PARTS processes. The report comes
with TRITON_DUMP_PTXAS_LOG=1, and only for what is not in Triton's cache yet.
"""

import contextlib
import io
import json
import sys

import torch
from planned import TARGETS, Kernel, kernels

ARCHITECTURES = ("sm_90", "sm_75", "sm_80", "sm_100")


def wanted(arch: str) -> list[Kernel]:
    """On Hopper the model shapes in bfloat16 and the largest of each op in float32, elsewhere the
    largest in half precision; Triton has no bfloat16 on sm_75."""
    half = torch.float16 if arch == "sm_75" else torch.bfloat16
    found = [k for k in kernels("triton", arch, everything=arch == "sm_90") if k.dtype == half]
    if arch == "sm_90":
        found = [k for k in found if k.large]
        largest = kernels("triton", arch, everything=False)
        found += [k for k in largest if k.dtype == torch.float32]
    return list({signature(k): k for k in found}.values())


def signature(k: Kernel) -> tuple[object, ...]:
    """What Triton compiles anew for."""
    dtypes = tuple(getattr(k.call.get(n), "dtype", None) for n in k.launch.pointers)
    return (
        k.launch.kernel.__name__,
        repr(sorted(k.launch.constants.items())),
        k.launch.num_warps,
        k.launch.alignment,
        dtypes,
    )


def main(part: int, parts: int) -> None:
    jobs = [(arch, k) for arch in ARCHITECTURES for k in wanted(arch)]
    report = []
    for arch, k in jobs[part::parts]:
        major, minor = TARGETS[arch].capability
        with contextlib.redirect_stdout(io.StringIO()) as said:
            k.launch.cubin(k.call, 10 * major + minor)
        report.append((f"{arch}: {k.name}", said.getvalue()))
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

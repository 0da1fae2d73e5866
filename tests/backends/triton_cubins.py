"""Compile the Triton kernels and print, as JSON, the resources that each takes.

python triton_cubins.py PART PARTS: the kernels are dealt out to PARTS processes.
"""

import json
import sys

import torch
from planned import TARGETS, Kernel, kernels, resource_usage

ARCHITECTURES = ("sm_90", "sm_75", "sm_80", "sm_100")


def wanted(arch: str) -> list[Kernel]:
    """On Hopper the model shapes, elsewhere one of each op and dtype; Triton has no bfloat16 on
    sm_75."""
    found = kernels("triton", arch, everything=arch == "sm_90")
    if arch == "sm_90":
        found = (k for k in found if k.large and k.dtype != torch.float16)
    if arch == "sm_75":
        found = (k for k in found if k.dtype != torch.bfloat16)
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
        cubin = k.launch.cubin(k.call, 10 * major + minor).asm["cubin"]
        report.append((f"{arch}: {k.name}", resource_usage(cubin)))
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

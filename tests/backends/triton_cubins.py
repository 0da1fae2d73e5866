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

from kernelwright.ops.attention import foreign, launch
from kernelwright.ops.plan import Call

ARCHITECTURES = ("sm_90", "sm_75", "sm_80", "sm_100")


def wanted(arch: str) -> list[Kernel]:
    """On Hopper the model shapes in bfloat16, the largest of each op in float32 and one of each op
    for unaligned addresses; elsewhere the largest in half precision, on sm_75 without bfloat16."""
    half = torch.float16 if arch == "sm_75" else torch.bfloat16
    found = [k for k in kernels("triton", arch, everything=False) if k.dtype == half]
    dtypes = [half]
    if arch == "sm_90":
        found = [k for k in kernels("triton", arch, everything=True) if k.dtype == half and k.large]
        unaligned = {k.call.op: k for k in found if k.launch.alignment < 16}
        found = [k for k in found if k.launch.alignment == 16] + list(unaligned.values())
        largest = kernels("triton", arch, everything=False)
        found += [k for k in largest if k.dtype == torch.float32]
        dtypes.append(torch.float32)
    found += [attention(arch, dtype) for dtype in dtypes]
    return list({signature(k): k for k in found}.values())


def attention(arch: str, dtype: torch.dtype) -> Kernel:
    """It is made of other libraries' kernels too, so no op declares this one."""
    query = torch.empty(1, 8, 512, 64, dtype=dtype, device="meta")
    out = foreign.allocate(query, query, query)
    values = {"query": query, "key": query, "value": query, "mask": None, "out": out}
    values |= {"scale": None, "causal": False}
    call = Call(values, op="attention", exact=None, target=TARGETS[arch])
    return Kernel(f"attention {dtype}", launch.plan(call), call, dtype, large=True)


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

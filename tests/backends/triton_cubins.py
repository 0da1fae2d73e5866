"""Compile the Triton kernels and print, as JSON, the assembler's report of each.

The report comes with TRITON_DUMP_PTXAS_LOG=1, and only for what is not in Triton's cache yet.
"""

import contextlib
import io
import itertools
import json
import sys
from typing import Any

import torch
from chosen import choices, largest_for_a_thread
from everything import EVERYTHING, share
from planned import TARGETS, Kernel, kernels

from kernelwright.ops.attention import custom_kernels, launch
from kernelwright.ops.channel_norm import CHANNEL_NORM
from kernelwright.ops.fp8 import QUANTIZE
from kernelwright.ops.fp8.rows import NORM_QUANTIZE, RESIDUAL_NORM_QUANTIZE, RESIDUAL_QUANTIZE
from kernelwright.ops.op import Op
from kernelwright.ops.plan import Call

ARCHITECTURES = ("sm_90", "sm_75", "sm_80", "sm_100")
HOPPER = ("sm_90", torch.bfloat16, 16)


def wanted(arch: str) -> list[Kernel]:
    """On Hopper the model shapes in bfloat16, the largest of each op in float32 and one of each op
    for unaligned addresses; elsewhere the largest in half precision, on sm_75 without bfloat16.
    Gradients at their largest, on Hopper and on the GPU with the fewest registers a block."""
    half = torch.float16 if arch == "sm_75" else torch.bfloat16
    found = [k for k in kernels("triton", arch, everything=False) if k.dtype == half]
    gradients = [k for k in found if k.call.op.endswith("_backward")]
    if arch not in ("sm_75", "sm_90"):
        found = [k for k in found if k not in gradients]
    dtypes = [half]
    if arch == "sm_90":
        every = kernels("triton", arch, everything=True)
        found = [k for k in every if k.dtype == half and k.large]
        found = [k for k in found if not k.call.op.endswith("_backward")] + gradients
        unaligned = {k.call.op: k for k in found if k.launch.alignment < 16}
        found = [k for k in found if k.launch.alignment == 16] + list(unaligned.values())
        largest = kernels("triton", arch, everything=False)
        found += [k for k in largest if k.dtype == torch.float32]
        dtypes.append(torch.float32)
    found += [attention(arch, dtype, keys=512) for dtype in dtypes]
    if arch == "sm_90":
        found.append(attention(arch, half, keys=128))
        found += eight_bits(arch) + by_channel(arch)
    return largest_for_a_thread(found)


def attention(arch: str, dtype: torch.dtype, keys: int) -> Kernel:
    """It is made of other libraries' kernels too, so no op declares this one. Few keys, which have
    a kernel of their own, with a mask."""
    query = torch.empty(1, 8, 512, 64, dtype=dtype, device="meta")
    key, mask = query[:, :, :keys], query.new_empty(1, 1, 1, keys) if keys <= 128 else None
    out = custom_kernels.allocate(query, key, key)
    values = {"query": query, "key": key, "value": key, "mask": mask, "out": out}
    values |= {"scale": None, "causal": False}
    call = Call(values, op="attention", exact=None, target=TARGETS[arch])
    return Kernel(f"attention {keys} {dtype}", launch.plan(call), call, dtype, large=True)


def eight_bits(arch: str) -> list[Kernel]:
    """The steps to eight bits, which are no ops by themselves, at the widths of models: FLUX's
    joined rows, Llama's feed-forward, and the norms of FLUX and of LTX-Video."""

    def rows(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    flux, ltx = (rows(2, 64, 3072), rows(2, 1, 3072)), (rows(2, 64, 2048), rows(2, 1, 2048))
    calls = [
        (QUANTIZE, (rows(64, 12288), None, "gelu_tanh", rows(64, 3072))),
        (QUANTIZE, (rows(64, 14336), rows(64, 14336), "silu", None)),
        (RESIDUAL_QUANTIZE, (ltx[0], *ltx, True)),
    ]
    for kind, (x, part) in (("layer", flux), ("rms", ltx)):
        norm = None, None, part, part, kind, 1e-6, True
        calls += [(NORM_QUANTIZE, (x, *norm)), (RESIDUAL_NORM_QUANTIZE, (x, x, part, *norm))]
    return [planned(arch, op, arguments) for op, arguments in calls]


def by_channel(arch: str) -> list[Kernel]:
    """Norms over the channels of VAEs, and the widest with all its parts."""

    def video(channels: int, positions: int) -> torch.Tensor:
        return torch.empty(1, channels, positions, dtype=torch.bfloat16, device="meta")

    widest, part = video(1024, 2688), video(1024, 1)
    calls = [(video(c, 2688), None, None, None, "silu", 1e-8) for c in (128, 256, 512)]
    calls.append((widest, part[0, :, 0], part, part, "silu", 1e-8))
    return [planned(arch, CHANNEL_NORM, arguments) for arguments in calls]


def planned(arch: str, op: Op, arguments: tuple[Any, ...]) -> Kernel:
    given = zip(op.arguments, arguments, strict=True)
    values = {**dict(given), **dict(zip(op.outputs, op.allocate(*arguments), strict=True))}
    call = Call(values, op=op.name, exact=None, target=TARGETS[arch])
    name = f"{op.name} {[tuple(a.shape) for a in arguments if isinstance(a, torch.Tensor)]}"
    return Kernel(name, op.kernels.triton(call), call, torch.bfloat16, large=True)


def dealt_out() -> list[Kernel]:
    """Every third kernel, once: on Hopper in bfloat16 those that have no other way and every third
    of the others; the rest on another GPU, in float32 or unaligned, in turns."""
    ways: dict[Any, dict[Any, list[Kernel]]] = {}
    for arch in ARCHITECTURES:
        for k in wanted(arch):
            way = ways.setdefault((arch, k.dtype, k.launch.alignment), {})
            way.setdefault((k.call.op, choices(k)), []).append(k)
    if EVERYTHING:
        return [k for way in ways.values() for same in way.values() for k in same]
    hopper = ways.pop(HOPPER)
    found: list[Kernel] = []
    given, third = dict.fromkeys(ways, 0), itertools.cycle((True, False, False))
    for kernel in dict.fromkeys(itertools.chain(hopper, *ways.values())):
        elsewhere = [name for name, way in ways.items() if kernel in way]
        if kernel in hopper and (not elsewhere or next(third)):
            found += hopper[kernel]
        else:
            fewest = min(elsewhere, key=given.__getitem__)
            given[fewest] += 1
            found += ways[fewest][kernel]
    return share(sorted(found, key=lambda k: k.call.target.capability), 3)


def main() -> None:
    report = []
    for k in dealt_out():
        major, minor = k.call.target.capability
        with contextlib.redirect_stdout(io.StringIO()) as said:
            k.launch.cubin(k.call, 10 * major + minor)
        report.append((f"sm_{major}{minor}: {k.name}", said.getvalue()))
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()

"""Times attention in eight bits beside cuDNN's in bfloat16, at the sizes of models.

    python tools/time_fp8_attention.py [--seconds 0.15] [--only NAME] [--out FILE]

For each size: cuDNN in bfloat16; the steps before ours, which quantise; ours with these steps; ours
alone; cuDNN in fp8 alone, if nvidia-cudnn-frontend is installed; and the errors against float32 on
Gaussian inputs whose keys share a mean. Calls run in turns, in CUDA graphs. The figures decide
SHAPES (ops/fp8_attention/cuda.py) and SERVED (inject/fp8/attention.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernelwright.measure import results
from kernelwright.measure.timing import Replay, Timed, bytes_of, medians, rotation
from kernelwright.ops.fp8_attention import FP8_ATTENTION, QUANTIZE_KV, cudnn

SIZES = {  # batch, heads, tokens, head_dim
    "Wan 1.3B 81f 832×480": (1, 12, 32760, 128),
    "Wan 2.2 14B 45f 832×480": (1, 40, 18720, 128),
    "FLUX 1024×1024": (1, 24, 4608, 128),
    "FLUX 768×768": (1, 24, 2816, 128),
    "FLUX 512×512": (1, 24, 1536, 128),
    "CogVideoX 49f 720×480": (2, 48, 17776, 64),
    "LTX-Video 161f 768×512": (2, 32, 8064, 64),
    "SD3.5 1024×1024": (2, 24, 4429, 64),
    "LTX-Video 49f 768×512": (2, 32, 2688, 64),
    "LTX-Video 25f 704×480": (2, 32, 1320, 64),
    "SD3.5 512×512": (2, 24, 1178, 64),
}
ROWS = 64  # of each head, whose error is computed: all would take too long
OURS = "ours, with quantising"


def heads(size: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Query, key and value as views of a packed projection."""
    batch, count, tokens, dim = size
    own = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(batch, tokens, 3, count, dim, device="cuda", generator=own)
    x[:, :, 1] += 2 * torch.randn(count, dim, device="cuda", generator=own)
    return [t.transpose(1, 2) for t in x.bfloat16().unbind(2)]


def in_16_bits(operands: list[Tensor]) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*operands)


def quantized(operands: list[Tensor]) -> tuple[Any, ...]:
    """What `attended` takes."""
    query, key, value = operands
    return query, *QUANTIZE_KV(key, value), key.shape[2], key.shape[3] ** -0.5


def attended(eight: tuple[Any, ...]) -> Tensor:
    return FP8_ATTENTION(*eight, backend="cuda")


def of_cudnn(operands: list[Tensor]) -> Timed:
    """cuDNN's attention in fp8, of operands that are quantised already."""
    query, key, value = operands
    pairs = [cudnn.quantize(t) for t in (query, key - key.mean(2, keepdim=True), value)]
    tensors, scales = [t.contiguous() for t, _ in pairs], [s for _, s in pairs]
    attend = cudnn.plan(tensors[0], query.shape[3] ** -0.5)
    return Timed(lambda _: attend(*tensors, *scales).float() * scales[2], [None])


def errors(operands: list[Tensor]) -> Callable[[Tensor], float]:
    """A function that gives the error of a result, relative to that of float32."""
    query, key, value = operands
    rows = torch.arange(0, query.shape[2], max(1, query.shape[2] // ROWS), device="cuda")
    scores = query[:, :, rows].float() @ key.float().transpose(2, 3) * query.shape[3] ** -0.5
    truth = scores.softmax(3) @ value.float()
    return lambda got: float((got[:, :, rows].float() - truth).norm() / truth.norm())


def measure(name: str, seconds: float) -> dict[str, Any]:
    """One row: microseconds and errors at one size."""
    size = SIZES[name]
    operands = heads(size)
    count = rotation(bytes_of(operands), operands[0].device)
    sets = [operands, *(heads(size, seed) for seed in range(1, count))]
    ways = {
        "cuDNN, bfloat16": Timed(in_16_bits, sets),
        OURS: Timed(lambda given: attended(quantized(given)), sets),
        "ours": Timed(attended, [quantized(given) for given in sets]),
    }
    if cudnn.available() is None:
        ways["cuDNN, fp8"] = of_cudnn(operands)
    off = errors(operands)
    error = {way: off(timed.call(timed.sets[0])) for way, timed in ways.items()}
    ways["quantising"] = Timed(quantized, sets)
    us = medians({way: Replay(timed) for way, timed in ways.items()}, seconds)
    shape = dict(zip(("batch", "heads", "tokens", "head_dim"), size, strict=True))
    speedup = us["cuDNN, bfloat16"] / us[OURS]
    return {"size": name, **shape, "gpu_us": us, "error": error, "speedup": speedup}


def line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{way} {us:.1f}" for way, us in row["gpu_us"].items())
    return f"{row['size']:24} {row['speedup']:.2f}×, off by {row['error'][OURS]:.2%}; us: {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.15, help="for each timing (0.15)")
    parser.add_argument("--only", help="sizes whose name contains this")
    parser.add_argument("--out", type=Path, help="a result file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU: PyTorch finds none")
    rows = []
    with torch.no_grad():
        for name in (n for n in SIZES if not given.only or given.only in n):
            rows.append(measure(name, given.seconds))
            print(line(rows[-1]), flush=True)
            torch.cuda.empty_cache()  # frees the memory of this size's graphs
            if given.out:
                results.write(given.out, "fp8-attention", rows)


if __name__ == "__main__":
    main()

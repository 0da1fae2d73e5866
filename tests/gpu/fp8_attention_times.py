"""Times attention in eight bits beside cuDNN's, and says from how many tokens on it is faster.

    python tests/gpu/fp8_attention_times.py [--seconds 0.15] [--only NAME]

For each shape: cuDNN in bfloat16; cuDNN in fp8, if nvidia-cudnn-frontend is installed, alone; the
steps before ours; ours, alone and with these steps; and all errors against float32, on Gaussian
inputs with a shared mean of the keys. Calls are timed in CUDA graphs: starting the short ones takes
Python longer than they run. The figures belong into SHAPES (ops/fp8_attention/cuda.py) and SERVED
(inject/fp8/attention.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernelwright.ops.fp8_attention import FP8_ATTENTION, MEAN, QUANTIZE_KV, cudnn

SIZES = {  # batch, heads, tokens, head_dim
    "FLUX": (1, 24, 4608, 128),
    "Wan 2.2 14B": (1, 40, 20280, 128),
    "Wan 1.3B": (1, 12, 32760, 128),
    "FLUX 768px": (1, 24, 2816, 128),
    "FLUX 512px": (1, 24, 1536, 128),
    "LTX 49f": (2, 32, 2688, 64),
    "LTX 25f": (2, 32, 1320, 64),
    "SD3.5 512px": (2, 24, 1178, 64),
    "SD3.5": (2, 24, 4429, 64),
    "LTX 161f": (2, 32, 8064, 64),
    "CogVideoX": (2, 48, 17776, 64),
}
CALLS = 5


def heads(batch: int, count: int, tokens: int, dim: int) -> list[Tensor]:
    """Views of a packed projection, keys with a shared mean."""
    own = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(batch, tokens, 3, count, dim, device="cuda", generator=own)
    x[:, :, 1] += 2 * torch.randn(count, dim, device="cuda", generator=own)
    return [t.transpose(1, 2) for t in x.bfloat16().unbind(2)]


def microseconds(call: Callable[[], Any], seconds: float) -> float:
    """The median time of a call, of CALLS in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(1000 * first.elapsed_time(last) / CALLS)
    return sorted(times)[len(times) // 2]


def truth(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of the result in float32, and which: all of them would take too long."""
    rows = torch.arange(0, query.shape[2], max(1, query.shape[2] // 64), device="cuda")
    scores = query[:, :, rows].float() @ key.float().transpose(2, 3) * query.shape[3] ** -0.5
    return scores.softmax(3) @ value.float(), rows


def measure(name: str, seconds: float) -> None:
    query, key, value = heads(*SIZES[name])
    dim, keys = query.shape[3], key.shape[2]
    true, rows = truth(query, key, value)
    flop = 4 * query.shape[0] * query.shape[1] * query.shape[2] * keys * dim

    def said(what: str, call: Callable[[], Any], result: bool = True) -> float:
        us = microseconds(call, seconds)
        line = f"{name:12} {what:38} {us:9.1f} us"
        if result:
            error = ((call()[:, :, rows].float() - true).norm() / true.norm()).item()
            line += f" {flop / us / 1e6:6.0f} TFLOP/s, off by {error:.2%}"
        print(line, flush=True)
        return us

    def plain() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value)

    base = said("cuDNN, bfloat16", plain)
    if no := cudnn.available():
        print(f"{name:12} cuDNN, fp8: {no}")
    else:
        eight = [cudnn.quantize(t) for t in (query, key - key.mean(2, keepdim=True), value)]
        tensors, scales = [t.contiguous() for t, _ in eight], [s for _, s in eight]
        attend = cudnn.plan(tensors[0], dim**-0.5)
        said("cuDNN, fp8, alone", lambda: attend(*tensors, *scales).float() * scales[2])
    before = said("quantising", lambda: QUANTIZE_KV(key, value, MEAN(key)), result=False)
    operands = query, *QUANTIZE_KV(key, value, MEAN(key)), keys, dim**-0.5
    us = said("ours", lambda: FP8_ATTENTION(*operands, backend="cuda"))
    print(f"{name:12} {base / (us + before):.2f} times cuDNN's in bfloat16, with quantising")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.15, help="for each timing")
    parser.add_argument("--only", help="sizes whose name contains this")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    with torch.no_grad():
        for name in (n for n in SIZES if not given.only or given.only in n):
            measure(name, given.seconds)


if __name__ == "__main__":
    main()

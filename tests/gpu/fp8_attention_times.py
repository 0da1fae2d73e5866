"""Times attention in eight bits beside cuDNN's, and says which tiles and sizes to serve.

    python tests/gpu/fp8_attention_times.py [--seconds 65]

For each shape: cuDNN in bfloat16; cuDNN in fp8, if nvidia-cudnn-frontend is installed, alone and
with quantising; the two steps of quantising; ours with query and key as int8 and as fp8, in the
tiles of TILES, alone and with quantising; and all errors against float32, on Gaussian inputs with a
shared mean of the keys. Calls are timed in CUDA graphs: starting the short ones takes Python longer
than they run. The last lines are what to write into TILES (ops/fp8_attention/triton.py) and SERVED
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

from kernelwright.ops.fp8_attention import (
    FP8_ATTENTION,
    QUANTIZE_QKV,
    STATISTICS,
    cudnn,
    triton,
)

SHAPES = {  # batch, heads, tokens, head_dim
    "FLUX 4608": (1, 24, 4608, 128),
    "Wan 32760": (1, 12, 32760, 128),
    "SD3.5 4429": (2, 24, 4429, 64),
    "LTX 49f 2688": (2, 32, 2688, 64),
    "LTX 161f 8064": (2, 32, 8064, 64),
}
TILES = [
    triton.Tile(*sizes)
    for sizes in (
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (128, 128, 8, 3),
        (64, 256, 4, 2),
        (64, 64, 4, 4),
    )
]
MOST_ERROR, GAIN = 0.05, 1.35
CALLS = 5


def heads(batch: int, count: int, tokens: int, dim: int) -> list[Tensor]:
    """Views of a packed projection, keys with a shared mean."""
    own = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(batch, tokens, 3, count, dim, device="cuda", generator=own)
    x[:, :, 1] += 2 * torch.randn(count, dim, device="cuda", generator=own)
    return [t.transpose(1, 2) for t in x.bfloat16().unbind(2)]


def microseconds(call: Callable[[], Any], seconds: float, graphed: bool = True) -> float:
    """The median time of a call, after one to warm up; graphed, of CALLS in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    replay, calls = call, 1
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        replay, calls = graph.replay, CALLS
        replay()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        replay()
        last.record()
        last.synchronize()
        times.append(1000 * first.elapsed_time(last) / calls)
    return sorted(times)[len(times) // 2]


def truth(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of the result in float32, and which: all of them would take too long."""
    rows = torch.arange(0, query.shape[2], max(1, query.shape[2] // 256), device="cuda")
    q, k, v = query[:, :, rows].float(), key.float(), value.float()
    s = q @ k.transpose(2, 3) * query.shape[3] ** -0.5
    return s.softmax(3) @ v, rows


def off(result: Tensor, true: Tensor, rows: Tensor) -> float:
    return ((result[:, :, rows].float() - true).norm() / true.norm()).item()


def with_tile(tile: triton.Tile) -> Callable[..., Tensor]:
    """FP8_ATTENTION with another tile: its cached plans are dropped."""
    triton.TILES = dict.fromkeys((64, 128), tile)
    FP8_ATTENTION._plans.clear()
    return lambda *args: FP8_ATTENTION(*args, backend="triton")


def measure(name: str, end: float) -> dict[str, Any]:
    query, key, value = heads(*SHAPES[name])
    dim, keys = query.shape[3], key.shape[2]
    each = 0.15
    true, rows = truth(query, key, value)
    flop = 4 * query.shape[0] * query.shape[1] * query.shape[2] * keys * dim

    def said(what: str, us: float, more: str = "", error: float | None = None) -> None:
        rate = f"{flop / us / 1e6:6.0f} TFLOP/s"
        error_text = "" if error is None else f"  error {error:.2%}"
        print(f"{name:14} {what:34} {us:9.1f} us {rate}{error_text}{more}", flush=True)

    def plain() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value)

    base = microseconds(plain, each)
    said("cuDNN bfloat16", base, error=off(plain(), true, rows))
    peer(query, key, value, said, base, each, true, rows)
    best: dict[str, Any] = {"base": base, "total": float("inf"), "dim": dim, "tokens": keys}
    found = STATISTICS(key, value, backend="triton")
    reading = microseconds(lambda: STATISTICS(key, value, backend="triton"), each)
    said("statistics", reading)
    for integers in (True, False):
        kind = "int8" if integers else "fp8"
        operands = query, key, value, *found, dim**-0.5, integers
        eight = QUANTIZE_QKV(*operands, backend="triton")
        writing = microseconds(lambda: QUANTIZE_QKV(*operands, backend="triton"), each)  # noqa: B023
        said(f"quantising, {kind}", writing)
        for tile in TILES if integers else [best["tile"]]:
            if time.perf_counter() > end:
                print(f"{name:14} stopped: the time is over")
                break
            try:
                attend = with_tile(tile)
                error = off(attend(*eight, query, keys), true, rows)
                us = microseconds(lambda: attend(*eight, query, keys), each)  # noqa: B023
            except Exception as no:
                print(f"{name:14} {tile}: {type(no).__name__}: {str(no)[:80]}")
                continue
            total = us + reading + writing
            where = f"{tile.rows}x{tile.keys} {tile.warps} warps {tile.stages} stages"
            said(
                f"ours {kind} {where}",
                us,
                f"  {base / total:.2f}x with quantising",
                error,
            )
            if total < best["total"] and error <= MOST_ERROR:
                best |= {"tile": tile, "total": total, "gain": base / total, "error": error}
        if "tile" not in best:
            break
    return best


def peer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    said: Any,
    base: float,
    each: float,
    true: Tensor,
    rows: Tensor,
) -> None:
    """cuDNN in fp8, one scale a tensor, the mean of the keys taken off."""
    if no := cudnn.available():
        print(f"cuDNN fp8: {no}")
        return
    try:
        eight = [cudnn.quantize(t) for t in (query, key - key.mean(2, keepdim=True), value)]
        tensors, scales = [t.contiguous() for t, _ in eight], [s for _, s in eight]
        attend = cudnn.plan(tensors[0], query.shape[3] ** -0.5)
        result = attend(*tensors, *scales).float() * scales[2]
        us = microseconds(lambda: attend(*tensors, *scales), each, graphed=False)
        said("cuDNN fp8", us, f"  {base / us:.2f}x alone", off(result, true, rows))
    except Exception as no:
        print(f"cuDNN fp8: {type(no).__name__}: {str(no)[:200]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=65, help="time for all shapes")
    parser.add_argument("--only", help="shapes whose name contains this")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    names = [n for n in SHAPES if not given.only or given.only in n]
    start, found = time.perf_counter(), {}
    for i, name in enumerate(names):
        left = start + given.seconds - time.perf_counter()
        found[name] = measure(name, time.perf_counter() + left / (len(names) - i))
    served: dict[int, int] = {}
    for name, best in found.items():
        if "tile" not in best:
            print(f"{name}: nothing within {MOST_ERROR:.0%}")
            continue
        goal = "reached" if best["gain"] >= GAIN else "missed"
        print(
            f"{name}: {best['tile']}, {best['gain']:.2f}x cuDNN bfloat16 with quantising, error "
            f"{best['error']:.2%}; goal of {GAIN}x {goal}"
        )
        if best["gain"] > 1:
            served[best["dim"]] = min(served.get(best["dim"], 2**31), best["tokens"])
    print(f"SERVED = {served}")


if __name__ == "__main__":
    main()

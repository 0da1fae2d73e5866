"""Attention with all scores in memory, with the bits of PyTorch's math kernel.

PyTorch takes that kernel where no fused one fits, as for heads that share a key without saying so
(Falcon 7B). Its scores are float32, [heads, queries, keys], and between its two GEMMs it passes
over them seven times: it adds the mask, takes the softmax, looks for rows that see no key, puts
zeros there, and converts the probabilities, which nobody reads. Here that is one pass in place.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...backends import cuda
from ..reuse.packed_weights import why_not_now

HALF = {torch.bfloat16: "kernelwright::bfloat16", torch.float16: "half"}
MASKS = {torch.bool: "bool", **HALF}
THREADS = 1024  # of PyTorch's softmax; one here does the work of TOGETHER
TOGETHER = 4
# PyTorch's softmax keeps shorter rows in a warp and longer ones in shared memory: other orders
MIN_KEYS, MAX_KEYS = THREADS + 1, 9 * THREADS
SAMPLE_ROWS = 64
MIN_QUERIES = 64  # not tuned: fewer gain little, and each generated token has a new number of keys


def why_not(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> str | None:
    """Why attention over [batch, heads, tokens, dim] has no kernel, or None if it has one."""
    keys = key.shape[2]
    if query.device.type != "cuda":
        return f"on {query.device.type}"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in HALF:
        return "not in one 16-bit dtype"
    if mask.dtype not in (torch.bool, query.dtype) or mask.ndim != 4:
        return f"a mask {list(mask.shape)} of {mask.dtype}"
    if not MIN_KEYS <= keys <= MAX_KEYS or mask.shape[3] != keys or mask.stride(3) != 1:
        return f"rows of {keys}: no kernel has PyTorch's order"
    if torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        return "scores in 16 bits"
    why = cuda.problem(query.device, query.dtype)
    if why is None and not has_order(keys, query.device):
        return f"rows of {keys}: PyTorch's softmax has another order"
    return why


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """F.scaled_dot_product_attention by its math kernel; the GEMMs are PyTorch's."""
    scale = math.sqrt(1 / math.sqrt(query.shape[3]))
    q, k, v = (t.float() for t in (query, key, value))
    scores = torch.matmul(q * scale, k.transpose(-2, -1) * scale)
    return torch.matmul(probabilities(scores, mask), v).to(query.dtype)


def probabilities(scores: Tensor, mask: Tensor) -> Tensor:
    """softmax(scores + mask) in the memory of scores [batch, heads, queries, keys]; zeros where a
    row sees no key."""
    steps = tuple(mask.stride(d) if mask.shape[d] > 1 else 0 for d in range(3))
    addresses = scores.data_ptr(), mask.data_ptr()
    aligned = addresses[0] % 16 == 0 and addresses[1] % (4 * mask.element_size()) == 0
    launch = _loaded(scores.device, mask.dtype, tuple(scores.shape), steps, aligned)
    launch(addresses)
    return scores


def has_order(keys: int, device: torch.device) -> bool:
    """Whether PyTorch's softmax of so many numbers has the order of the kernel here: tried once,
    and not while a graph is captured."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if (found := _orders.get((index, keys))) is None:
        if why_not_now(device) is not None:
            return False
        generator = torch.Generator(device).manual_seed(0)
        x = 3 * torch.randn(1, 1, SAMPLE_ROWS, keys, generator=generator, device=device)
        expected = torch.softmax(x, -1)
        seen = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device)
        found = _orders[index, keys] = torch.equal(probabilities(x, seen), expected)
    return found


_orders: dict[tuple[int, int], bool] = {}


@functools.lru_cache(maxsize=128)
def _loaded(
    device: torch.device,
    mask: torch.dtype,
    shape: tuple[int, ...],
    steps: tuple[int, ...],
    aligned: bool,
) -> Any:
    launch = launch_of(mask, shape, steps, aligned)
    return backends.load(launch, {"scores": True, "mask": True}, device, "attention")


def launch_of(
    mask: torch.dtype, shape: tuple[int, ...], steps: tuple[int, ...], aligned: bool = True
) -> cuda.CudaLaunch:
    """The launch for scores of this shape, and the steps of a mask from sample to sample, head to
    head and row to row; `aligned`: both begin where four elements may be read at once."""
    batch, heads, queries, keys = shape
    whole = aligned and not any(step % TOGETHER for step in (*steps, keys))
    per_thread = -(-keys // THREADS)
    return cuda.CudaLaunch(
        source="inject/fusions/all_scores.cuh",
        template=f"kernelwright::probabilities<{MASKS[mask]}, {per_thread}, {str(whole).lower()}>",
        arguments="kernelwright::AllScoresArgs",
        grid=batch * heads * queries,
        block=THREADS // TOGETHER,
        pointers=("scores", "mask"),
        layout="3q3I",
        scalars=(*steps, heads, queries, keys),
    )

"""Launch choices of the CUDA kernel: those of the rotary kernel, and blocks that copy the value."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...backends import Unsupported
from ...backends.cuda import CudaLaunch
from ..rope.call import PARTS, RopeCall
from ..rope.cuda import plan as plan_rope
from ..rows import rows_of, vector_width

if TYPE_CHECKING:
    from ..plan import Call

# blocks count themselves in the upper 24 bits of the length
MAX_BLOCKS = 2**23
ROPE = "kernelwright::rope<"
Q_BLOCKS = -5  # among the scalars of the rotary kernel


def plan(call: Call) -> CudaLaunch:
    query, value, keys, values = (call[n] for n in ("query", "value", "keys", "values"))
    if not keys.is_contiguous() or not values.is_contiguous():
        raise Unsupported("the cache is not contiguous")
    if len({t.dtype for t in (query, value, keys, values)}) > 1:
        raise Unsupported("rows and cache have different dtypes")
    tokens = query.shape[1]
    # the first positions of a cache, laid out as the rows that are written to it
    k_out, v_out = (t[:, :, :tokens].transpose(1, 2) for t in (keys, values))
    parts = {n: call[n] for n in PARTS if n not in ("q_out", "k_out")}
    parts |= {"q_out": call["out"], "k_out": k_out}
    pointers = tuple({"q_out": "out", "k_out": "keys"}.get(n, n) for n in PARTS)
    normed = call["q_weight"] is not None
    rope = RopeCall(parts, pointers, normed, query.shape[-1], call["layout"], float(call["eps"]))
    made = plan_rope(rope, call)

    width = value.shape[-1]
    (_, *sizes), places = rows_of(value.shape, [value, v_out]).padded()
    room = [s for place in places for s in place]
    vector = vector_width(width, value.dtype.itemsize, call.alignment, room)
    v_rows = value.numel() // width
    v_blocks = -(-v_rows * (width // vector) // made.block)
    q_blocks = int(made.scalars[Q_BLOCKS])
    k_blocks = made.grid - q_blocks
    if k_blocks + v_blocks > MAX_BLOCKS:
        raise Unsupported(f"{v_rows} rows of key and value")
    return replace(
        made,
        source="ops/rope_into_cache/cuda.cuh",
        template=made.template.replace(
            ROPE, f"kernelwright::rope_into_cache<{width}, {vector}, ", 1
        ),
        arguments="kernelwright::IntoCacheArgs",
        grid=made.grid + v_blocks,
        pointers=("value", "values", "length", *made.pointers),
        # RopeArgs ends with padding
        layout=f"{made.layout}0q8q7I",
        scalars=(
            *made.scalars,
            *room,
            keys.stride(2),
            values.stride(2),
            v_rows,
            *sizes,
            made.grid,
            k_blocks + v_blocks,
            tokens,
            keys.shape[2],
        ),
        alignment=min(16, max(made.alignment, vector * value.dtype.itemsize)),
    )

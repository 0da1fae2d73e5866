"""The launch of the CUDA kernel: the threads of a group share a row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kernelwright.backends import Unsupported
from kernelwright.backends.cuda import TYPES, CudaLaunch
from kernelwright.ops.row.order import Order, eager_mean_order, free_threads
from kernelwright.ops.rows import rows_of, vector_width

if TYPE_CHECKING:
    from kernelwright.ops.op import Call

# wider rows do not fit the registers of a block
MAX_WIDTH = 8192


def plan(call: Call) -> CudaLaunch:
    """The launch for one signature."""
    operands = [call[n] for n in ("input", "gate", "weight", "out")]
    shape, dtype, weight = call["out"].shape, call["out"].dtype, call["weight"]
    width, types = shape[-1], (dtype, dtype if weight is None else weight.dtype)
    if width > MAX_WIDTH:
        raise Unsupported(f"rows of {width}; the kernel holds up to {MAX_WIDTH} elements")
    rows = rows_of(shape, operands)
    sizes, strides = rows.padded()
    places = [s for place in strides for s in place]
    # a vector of the wider dtype has to be aligned too
    size = max(t.itemsize for t in types)
    room = vector_width(width, size, call.alignment, places)
    order, rounding = Order("FreeRms"), "Once"
    if call.exact:
        if len(set(types)) > 1:
            raise Unsupported(f"eager would promote {types[0]} rows by {types[1]} weights")
        # the order of x.pow(2).mean(-1) for this width and number of rows; raises Unsupported
        # where it has no kernel, and the call then runs the eager chain
        order, rounding = eager_mean_order(width, rows.count, room), f"Each<{TYPES[dtype]}>"
        if order.vector > room:
            raise Unsupported(f"the exact order needs {order.vector} aligned elements at once")
    vector = order.vector or room
    threads = order.threads or free_threads(width, vector)
    block = max(128, threads)
    # the fast exp is accurate enough for 16 bits, not for 32
    fast = "false" if call.exact or dtype.itemsize == 4 else "true"
    names = ", ".join(TYPES[t] for t in types)
    return CudaLaunch(
        source=str(Path(__file__).with_name("cuda.cuh")),
        template="kernelwright::norm_then_gate_kernel<"
        f"{names}, kernelwright::Spread<{width}, {vector}, {threads}>, {block}, "
        f"{len(rows.sizes)}, {'false' if weight is None else 'true'}, {fast}, "
        f"kernelwright::{order.norm}, kernelwright::{rounding}>",
        arguments="kernelwright::NormThenGateArgs",
        grid=-(-rows.count // (block // threads)),
        block=block,
        pointers=("input", "gate", "weight", "out"),
        layout="12q3I2f",
        scalars=(*places, rows.count, *sizes[1:], call["eps"], order.factor),
        alignment=min(16, vector * size),
    )

"""The exact calls of declared cases that have no kernel: all others must run one."""

import functools
from operator import or_

import torch
from numerics import as_tuple, run

from kernelwright.backends import HOPPER, Unsupported
from kernelwright.ops import ways
from kernelwright.ops.case import Inputs
from kernelwright.ops.op import Op, registry
from kernelwright.ops.plan import Call
from kernelwright.ops.rows import has_gaps

EXACT = [
    op for op in registry().values() if isinstance(op, Op) and op.exact and "cuda" in op.backends
]

# PyTorch sums these widths in an order that no kernel has: F.rms_norm and F.layer_norm widths that
# are not a multiple of 4, at::mean some odd ones. How it adds a bias alone to F.layer_norm is not
# known either
WIDTHS = {
    ("adaln_layernorm", "diffusers"): ("odd width",),
    ("adaln_layernorm", "wan"): ("odd width",),
    ("adaln_rmsnorm", "torch"): ("odd width",),
    ("adaln_zero", "torch"): ("odd width",),
    ("gated_residual_norm", "torch"): ("norm only",),
    ("gated_residual_norm", "wan"): ("norm only",),
    ("layernorm", "torch"): ("bias only", "odd width, mean 100", "mean 10000"),
    ("layernorm", "wan"): ("bias only", "odd width, mean 100", "mean 10000"),
    ("rmsnorm", "torch"): (
        "storage offset",  # PyTorch uses another order where rows are not 16-byte aligned
        *(f"width {n}" for n in (1, 33, 41, 65, 123, 513, 769, 1001)),
    ),
    ("rmsnorm", "diffusers"): tuple(f"width {n}" for n in (1, 513, 769, 1001)),
    ("rmsnorm", "transformers"): tuple(f"width {n}" for n in (1, 513, 769, 1001)),
    ("rmsnorm_residual", "torch"): ("odd width",),
}
# at::mean loads float32 rows one element at a time, these kernels two
IN_FLOAT32 = {("qk_norm_rope", "transformers"): ("wan", "flux")}

# QuACK's kernel of F.rms_norm sums vectors of eight 16-bit elements; half of such a row, which a
# rotation pairs with the other half, is no multiple of eight
WITH_QUACK = {("qk_norm_rope", "diffusers"): ("width 72",)}


def has_kernel(op, case, chain, dtype):
    """Whether an exact call of the case must run a kernel, according to the tables above."""
    without = WIDTHS.get((op.name, chain), ())
    if dtype == torch.float32:
        without += IN_FLOAT32.get((op.name, chain), ())
    elif ways.way("F.rms_norm") == ways.QUACK:
        without += WITH_QUACK.get((op.name, chain), ())
    return case.name not in without


def promotes(op, case, chain, dtype):
    """Whether eager returns another dtype: the op then raises, see tests/ops/test_errors.py."""
    eager = as_tuple(run(op, op.exact[chain], case.arguments(Inputs(dtype, "meta"))))
    return any(e.dtype != dtype for e in eager)


def planned(op, case, chain, dtype, target=HOPPER):
    """The launch of such a call, planned without a GPU, or None for an empty output; raises
    Unsupported if there is none. A GPU's allocations are aligned, so the alignment of a tensor
    follows from its storage offset."""
    arguments = case.arguments(Inputs(dtype, "meta"))
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and has_gaps(value):
            arguments[name] = value.contiguous()
    outputs = op.allocate(*(arguments[n] for n in op.arguments))
    if not any(o.numel() for o in outputs):
        return None
    values = arguments | dict(zip(op.outputs, outputs, strict=True))

    def at(alignment):
        call = Call(values, op=op.name, exact=chain, target=target, alignment=alignment)
        return op.kernels.cuda(call)

    launch = at(16)
    given = [values[n] for n in launch.pointers if n and values[n] is not None]
    bits = functools.reduce(or_, (t.storage_offset() * t.itemsize for t in given))
    return at(bits & -bits) if bits % launch.alignment else launch


def refused(op, case, chain, dtype):
    """Why there is no kernel for such a call, or None if there is one."""
    try:
        planned(op, case, chain, dtype)
    except Unsupported as no:
        return str(no)
    return None

"""Calls of attention, and the error bound they must meet."""

import math
from contextlib import contextmanager
from unittest import mock

import torch
from numerics import as_good_as_eager

from kernelwright.ops.attention import custom_kernels, launch, reference, sdpa

LOWEST = torch.finfo(torch.float32).min


def tensors(
    batch, heads, groups, queries, keys, dim, value_dim=None, dtype=torch.float32, device="cpu"
):
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = (
        (batch, heads, queries, dim),
        (batch, groups, keys, dim),
        (batch, groups, keys, value_dim or dim),
    )
    return [torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes]


def hold(got, query, key, value, mask=None, scale=None, causal=False, eager="torch"):
    """The bound: the error of eager in the same dtype, and a rounding of the output.

    Eager's error counts twice: kernels round the weights before the second GEMM, and the output;
    PyTorch's math backend rounds only the output.
    """
    wide = [t.double() for t in (query, key, value)]
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    truth = reference.attention(*wide, wide_mask, scale, causal)
    chain = sdpa.KERNELS.get(eager, sdpa.default)
    doubled = truth + 2 * (chain(query, key, value, mask, scale, causal).double() - truth)
    as_good_as_eager(got, truth, doubled)


# [batch, heads, key heads, queries, keys, head_dim, value_dim]: all keys of a head in one tile
FEW_KEYS = {
    "128 keys": (2, 2, 2, 130, 128, 64, 64),
    "77 keys": (1, 2, 2, 64, 77, 64, 64),
    "one key": (1, 2, 2, 70, 1, 64, 64),
    "16 keys": (1, 1, 1, 40, 16, 32, 32),
    "heads in groups": (2, 4, 2, 33, 20, 16, 16),
    "head_dim 13": (1, 1, 1, 65, 21, 13, 13),
    "values of another width": (1, 2, 1, 17, 40, 40, 24),
}

# masks that are the same for every query, of [batch, heads, keys]
KEY_MASKS = {
    "[Sk]": lambda b, h, k: (k,),
    "[1, Sk]": lambda b, h, k: (1, k),
    "[B, 1, 1, Sk]": lambda b, h, k: (b, 1, 1, k),
    "[1, H, 1, Sk]": lambda b, h, k: (1, h, 1, k),
    "[B, H, 1, Sk]": lambda b, h, k: (b, h, 1, k),
    "[1, 1]": lambda b, h, k: (1, 1),
    "[B, H, 1, 1]": lambda b, h, k: (b, h, 1, 1),
}


def key_mask(kind, shape, dtype):
    """A mask of the kind: bool, bias, -10000, -inf or finfo.min."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if kind == "bool":
        return values > -0.5
    if kind == "bias":
        return values.to(dtype)
    hidden = {"-10000": -10000.0, "-inf": -math.inf, "lowest": torch.finfo(dtype).min}[kind]
    return torch.zeros(shape, dtype=dtype).masked_fill(values < -0.5, hidden)


@contextmanager
def plans():
    """The names of the Triton kernels planned for calls; plans cached before are dropped."""
    seen, planning = [], launch.plan

    def plan(call):
        found = planning(call)
        seen.append(found.kernel.__name__)
        return found

    custom_kernels._launches.clear()
    try:
        with mock.patch.object(launch, "plan", plan):
            yield seen
    finally:
        custom_kernels._launches.clear()

"""Rows and their addresses: what kernels are told is where the elements lie."""

import itertools
import random

import pytest
import torch

from kernelwright.backends import Unsupported
from kernelwright.ops.rows import MAX_DIMS, MAX_ROWS, rows_of, vector_width

LAYOUTS = {
    "contiguous": lambda *s: torch.empty(s, device="meta"),
    "columns of a wider tensor": lambda *s: torch.empty((*s[:-1], 3 * s[-1]), device="meta")[
        ..., s[-1] : 2 * s[-1]
    ],
    "transposed": lambda *s: torch.empty((s[1], s[0], *s[2:]), device="meta").transpose(0, 1),
    "expanded": lambda *s: torch.empty((1, *s[1:]), device="meta").expand(s),
    "one row for all": lambda *s: torch.empty(s[-1], device="meta"),
    "one row a batch": lambda *s: torch.empty((s[0], *[1] * (len(s) - 2), s[-1]), device="meta"),
    "absent": lambda *s: None,
}


def offsets(rows, operand):
    """The offset of every row of one operand, as a kernel computes it."""
    strides = rows.strides[operand]
    if strides is None:
        return None
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, rows.sizes))
    ]


def expected(t, shape):
    if t is None:
        return None
    full = t.expand(shape)
    return [
        sum(i * s for i, s in zip(index, full.stride(), strict=False))
        for index in itertools.product(*map(range, shape[:-1]))
    ]


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8), (2, 1, 8), (1, 1, 8), (2, 3, 4, 8)], ids=str)
def test_every_row_of_every_operand_is_where_it_lies(shape):
    makers = list(LAYOUTS.values())
    draw = random.Random(0)
    for _ in range(200):
        operands = [draw.choice(makers)(*shape) for _ in range(3)]
        try:
            rows = rows_of(shape, operands)
        except Unsupported:
            assert len(shape) - 1 > MAX_DIMS
            continue
        assert rows.count == torch.Size(shape[:-1]).numel()
        assert 1 <= len(rows.sizes) <= MAX_DIMS
        for i, t in enumerate(operands):
            assert offsets(rows, i) == expected(t, shape)
        sizes, strides = rows.padded()
        assert len(sizes) == 3
        assert all(len(s) == 3 for s in strides)


def test_contiguous_dimensions_merge_into_one():
    x = torch.empty(4, 5, 6, 8, device="meta")
    assert rows_of(x.shape, [x]).sizes == (120,)


def test_a_modulation_beside_them_keeps_the_dimension_it_varies_over():
    x, scale = torch.empty(4, 5, 8, device="meta"), torch.empty(4, 1, 8, device="meta")
    rows = rows_of(x.shape, [x, scale])
    assert rows.sizes == (4, 5)
    assert rows.strides == ((40, 8), (8, 0))


def test_dimensions_of_one_count_for_nothing():
    x = torch.empty(1, 5, 1, 8, device="meta")
    assert rows_of(x.shape, [x]).sizes == (5,)
    assert rows_of((8,), [torch.empty(8, device="meta")]).sizes == (1,)


def test_an_absent_operand_has_no_strides():
    x = torch.empty(4, 8, device="meta")
    rows = rows_of(x.shape, [x, None])
    assert rows.strides == ((8,), None)
    assert rows.padded()[1] == [(0, 0, 8), (0, 0, 0)]


def test_four_dimensions_that_cannot_merge_are_refused():
    x = torch.empty(3, 4, 5, 6, 8, device="meta").permute(2, 0, 3, 1, 4)
    with pytest.raises(Unsupported, match="cannot be merged into 3"):
        rows_of(x.shape, [x])


def test_more_rows_than_a_launch_holds_are_refused():
    most = torch.empty(MAX_ROWS, 1, device="meta")
    assert rows_of(most.shape, [most]).count == MAX_ROWS
    over = torch.empty(2**16, 2**15, 1, device="meta")
    with pytest.raises(Unsupported, match="2147483648 rows"):
        rows_of(over.shape, [over])


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_vector_is_the_widest_that_alignment_width_and_strides_allow(itemsize):
    for width, alignment, stride in itertools.product(
        (1, 2, 3, 4, 6, 8, 12, 64, 100, 1152), (2, 4, 8, 16, 32), (0, 1, 2, 4, 6, 8, 24, 192)
    ):
        if alignment < itemsize:
            continue
        v = vector_width(width, itemsize, alignment, (stride, 0))
        allowed = [
            n
            for n in (1, 2, 4, 8)
            if n * itemsize <= min(16, alignment) and not width % n and not stride % n
        ]
        assert v == max(allowed)

"""Linear layers of few rows: the CUDA kernel, run by g++, against float64; and what it refuses."""

import itertools
import shutil

import pytest
import torch
from everything import share

from kernelwright.backends import cuda
from kernelwright.checking import emulator, planned_kernels
from kernelwright.ops.case import Inputs
from kernelwright.ops.few_rows import EIGHT_BIT_LINEAR_FEW_ROWS, LINEAR_FEW_ROWS, problem

OPS = [LINEAR_FEW_ROWS, EIGHT_BIT_LINEAR_FEW_ROWS]
INTEGERS = [c for c in EIGHT_BIT_LINEAR_FEW_ROWS.cases if "integers" in c.name and not c.large]
# every second case in bfloat16, others of each op, and one in float16; all of int8
SMALL = [
    (op, case, dtype)
    for turn, op in enumerate(OPS)
    for dtype, cases in (
        (torch.bfloat16, share((c for c in op.cases if not c.large), 2, start=turn)),
        (torch.float16, op.cases[1:2]),
    )
    for case in cases
    if case not in INTEGERS
]
SMALL += [
    (EIGHT_BIT_LINEAR_FEW_ROWS, case, dtype)
    for case in INTEGERS
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.fixture(scope="module")
def library():
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return {
        op: emulator.compiled(op, [(c.arguments(Inputs(dtype)), None) for _, c, dtype in cases])
        for op, cases in itertools.groupby(SMALL, key=lambda found: found[0])
    }


@pytest.mark.parametrize(
    ("op", "case", "dtype"), SMALL, ids=lambda x: getattr(x, "name", None) or str(x)
)
def test_the_kernel_rounds_once(library, op, case, dtype):
    given = case.arguments(Inputs(dtype))
    (got,) = emulator.emulated(library[op], op, given)
    wide = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    truth = op.reference(**wide)
    # half a unit of the last place of the result, and float32's sum
    bound = torch.finfo(dtype).eps / 2 * truth.abs() + 1e-5
    assert ((got.double() - truth).abs() <= bound).all()
    assert torch.equal(op.call(given, backend="torch"), op.reference(**given))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_it_compiles_without_spilling(op):
    found = planned_kernels.kernels("cuda", "sm_90", everything=True, ops=[op])
    most = max(found, key=lambda kernel: kernel.call["x"].numel())  # that of most registers
    _, log = cuda.build(most.launch.code, "sm_90", verbose=True)
    assert "0 bytes spill stores" in log


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(4, 24)}, "x has rows of 16"),
        ({"bias": torch.zeros(3)}, "expected \\[8\\]"),
        ({"glu": True, "bias": torch.zeros(8)}, "without a bias"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    given = {"x": torch.zeros(1, 16), "weight": torch.zeros(8, 16), "bias": None, "glu": False}
    with pytest.raises(ValueError, match=words):
        LINEAR_FEW_ROWS.call({**given, **change})


def test_what_it_does_not_take_is_said():
    x, weight = torch.zeros(1, 16).bfloat16(), torch.zeros(8, 16).bfloat16()
    assert problem(x, weight) == "tensors are on cpu, it needs a CUDA GPU"

"""RoPE into a static cache: the CUDA kernel, run by g++, against PyTorch's ops, bit for bit."""

import shutil

import pytest
import torch

from kernelwright.backends import cuda
from kernelwright.checking import emulator, planned_kernels
from kernelwright.ops.case import Inputs
from kernelwright.ops.rope_into_cache import ROPE_INTO_CACHE as OP
from kernelwright.ops.rope_into_cache.cases import step

SMALL = [
    (case, dtype, exact)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for case in (OP.cases if dtype == torch.bfloat16 else OP.cases[3:4])
    for exact in (None, "transformers")
    if not case.large
]
SHOWN = {"ids": lambda x: getattr(x, "name", None) or str(x)}
FULL = step(2, 3, (4, 2), 64, 8, 6)


@pytest.fixture(scope="module")
def library():
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    calls = [(c.arguments(Inputs(dtype)), exact) for c, dtype, exact in SMALL]
    return emulator.compiled(OP, [*calls, (FULL(Inputs(torch.bfloat16)), "transformers")])


def written(given):
    return [given[n] for n in OP.writes]


def copied(given):
    return {n: t.clone() if n in OP.writes else t for n, t in given.items()}


@pytest.mark.parametrize(("case", "dtype", "exact"), SMALL, **SHOWN)
def test_the_kernel_writes_what_pytorch_writes(library, case, dtype, exact):
    given = case.arguments(Inputs(dtype))
    theirs = copied(given)
    want = OP.call(theirs, exact=exact, backend="torch")
    (got,) = emulator.emulated(library, OP, given, exact)
    if exact:
        assert torch.equal(got, want)
        assert all(map(torch.equal, written(given), written(theirs)))
        return
    # one rounding each of the same numbers, in float32 of another order
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(got, want, **near)
    torch.testing.assert_close(given["keys"], theirs["keys"], **near)
    assert torch.equal(given["values"], theirs["values"])
    assert torch.equal(given["length"], theirs["length"])


def test_rows_that_do_not_fit_end_the_kernel_and_are_not_written(library):
    given = FULL(Inputs(torch.bfloat16))
    before = copied(given)
    with pytest.raises(AssertionError, match="__trap"):
        emulator.emulated(library, OP, given, "transformers")
    assert all(map(torch.equal, written(given), written(before)))
    with pytest.raises(IndexError):  # of index_copy_
        OP.call(given, backend="torch")


@pytest.mark.parametrize("arch", planned_kernels.TARGETS)
def test_it_compiles_for_every_gpu_without_spilling(arch):
    found = planned_kernels.kernels("cuda", arch, everything=False, ops=[OP])
    exact = [k for k in found if "exact" in k.name and k.dtype == torch.bfloat16]
    _, log = cuda.build(exact[0].launch.code, arch, verbose=True)
    assert "0 bytes spill stores" in log


def test_a_call_counts_as_a_write_and_only_of_what_it_writes():
    given = OP.cases[0].arguments(Inputs(torch.float32))
    before = {n: t._version for n, t in given.items() if isinstance(t, torch.Tensor)}
    OP.call(given)
    assert {n for n, v in before.items() if given[n]._version != v} == set(OP.writes)


def test_gradients_are_refused():
    given = OP.cases[0].arguments(Inputs(torch.float32))
    query = given["query"].clone().requires_grad_()
    with pytest.raises(ValueError, match="call it under torch"):
        OP.call({**given, "query": query})
    assert given["length"] == 3


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"keys": torch.zeros(1, 3, 9, 64)}, ValueError, "keys is .* expected \\[1, 2, room, 64"),
        ({"values": torch.zeros(1, 2, 8, 64)}, ValueError, "values has room for 8, keys for 9"),
        ({"keys": torch.zeros(1, 2, 9, 64).half()}, TypeError, "keys is torch.float16"),
        ({"length": torch.tensor(3.0)}, TypeError, "length is torch.float32, expected int64"),
        ({"length": torch.tensor([3])}, ValueError, "expected \\[\\] int64"),
        ({"q_weight": torch.ones(64)}, ValueError, "one of q_weight and k_weight is None"),
    ],
)
def test_wrong_arguments_are_named(change, error, words):
    given = OP.cases[0].arguments(Inputs(torch.float32))
    with pytest.raises(error, match=words):
        OP.call({**given, **change})

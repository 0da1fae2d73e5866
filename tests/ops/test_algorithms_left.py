"""linear is F.linear itself wherever no algorithm may or can be chosen."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from cublaslt_on_cpu import NOT_SUPPORTED, Known, decided, operands, untouched
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import kernelwright as kw
from kernelwright.ops.linear import algorithms, choosing, cublaslt
from kernelwright.ops.linear.algorithms import linear

SOURCE = algorithms.__file__


@pytest.mark.parametrize(
    "name",
    ["cublasLtCreate", "cublasLtMatmulDescCreate", "cublasLtMatmulAlgoGetHeuristic"],
)
def test_an_error_of_cublaslt_leaves_the_product_to_pytorch_and_is_told(pretend, name):
    library = pretend(Known(10), answers={name: NOT_SUPPORTED})
    x, weight, bias = operands()
    for _ in range(2):
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert not library.launched
    assert f"1 not: {name} answered with status 15" in algorithms.describe()


def test_an_error_of_every_first_launch_does_so_too(pretend):
    pretend(Known(10), answers={"cublasLtMatmul": 13})
    x, weight, bias = operands()
    for _ in range(2):
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert "cublasLtMatmul answered with status 13" in algorithms.describe()


def test_an_error_of_a_later_launch_does_so_too(pretend):
    library = pretend(Known(10))
    x, weight, bias = operands()
    linear(x, weight, bias)
    library.answers["cublasLtMatmul"] = 13
    for _ in range(2):
        before = len(library.launched)
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert len(library.launched) == before
    assert "cublasLtMatmul answered with status 13" in algorithms.describe()


@pytest.mark.parametrize(("cuda", "why"), [(None, "without CUDA"), ("1.0", "libcublasLt.so.1")])
def test_a_torch_without_the_library_leaves_the_product_to_pytorch(pretend, monkeypatch, cuda, why):
    pretend(Known(10))
    monkeypatch.setattr(choosing, "load", cublaslt.load)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    x, weight, bias = operands()
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert why in decided().why


@pytest.mark.parametrize(
    "make",
    [
        lambda x, w, b: (x.t().contiguous().t(), w, b),
        lambda x, w, b: (x[:1].expand(6, -1), w, b),
        lambda x, w, b: (torch.randn(6, 36, dtype=x.dtype)[:, :32], w, b),
        lambda x, w, b: (x.float(), w.float(), b.float()),
        lambda x, w, b: (torch.randn(3, 4, 32, dtype=x.dtype)[:, :2], w, b),
        lambda x, w, b: (x, w, b[:1]),
        lambda x, w, b: (x, w, torch.randn(6, 16, dtype=x.dtype)),
        lambda x, w, b: (x, w, torch.randn(32, dtype=x.dtype)[::2]),
    ],
    ids=[
        *("columns", "expanded", "odd rows", "float32", "uneven rows"),
        *("one bias", "a bias a row", "bias with gaps"),
    ],
)
def test_what_cublaslt_cannot_be_told_of_is_left_to_pytorch(pretend, make):
    library = pretend(Known(10))
    arguments = make(*operands())
    for _ in range(2):
        assert torch.equal(linear(*arguments), F.linear(*arguments))
    assert not library.launched
    assert decided().way is None


def test_an_odd_address_is_left_to_pytorch_and_decides_nothing(pretend):
    library = pretend(Known(10))
    _, weight, bias = operands()
    odd, even = torch.randn(6 * 32 + 8, dtype=torch.bfloat16)[8:].view(6, 32), operands()[0]
    linear(odd, weight, bias)
    assert not algorithms.decisions()
    linear(even, weight, bias)
    before = len(library.launched)
    assert torch.equal(linear(odd, weight, bias), F.linear(odd, weight, bias))
    assert len(library.launched) == before
    linear(even, weight, bias)
    assert len(library.launched) == before + 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_plain_memory_are_left_to_pytorch(pretend):
    library = pretend(Known(10))
    x, weight, bias = operands()
    for _ in range(2):
        linear(x, weight, bias)
    before = len(library.launched)
    sparse = linear(x.float().to_sparse(), weight.float())
    assert torch.equal(sparse, F.linear(x.float().to_sparse(), weight.float()))
    parts = torch.nested.nested_tensor([x[:2], x[2:]])
    got, expected = linear(parts, weight), F.linear(parts, weight)
    assert all(map(torch.equal, got.unbind(), expected.unbind()))
    assert len(library.launched) == before
    decided()


@pytest.mark.parametrize("kind", ["a tensor", "a parameter", "a call site"])
def test_who_has_to_see_linear_sees_it(pretend, kind):
    """Also where the last call of a layer or a place is remembered."""
    library = pretend(Known(10))
    x, weight, bias = operands()
    if kind == "a parameter":
        weight = nn.Parameter(weight, False)
    linear = algorithms.CallSite() if kind == "a call site" else algorithms.linear
    for _ in range(2):
        linear(x, weight, bias)
    assert not untouched(library, lambda: linear(x, weight, bias))
    assert not untouched(library, lambda: linear(x, nn.Parameter(weight, False), bias))

    with FlopCounterMode(display=False) as counter:
        assert untouched(library, lambda: linear(x, weight, bias))
    assert counter.get_total_flops() == 2 * 6 * 32 * 16
    with torch.autocast("cpu", torch.bfloat16):
        assert untouched(library, lambda: linear(x, weight, bias))
    with torch.device("cpu"):  # a torch function mode
        assert untouched(library, lambda: linear(x, weight, bias))
    with algorithms.use_algorithms(False):
        assert untouched(library, lambda: linear(x, weight, bias))
    with kw.use_backend("torch"):
        assert untouched(library, lambda: linear(x, weight, bias))
    trained = nn.Parameter(weight)
    assert untouched(library, lambda: linear(x, trained, bias).sum().backward())
    assert trained.grad is not None
    with torch.no_grad():
        assert not untouched(library, lambda: linear(x, trained, bias))
    several = x.expand(2, -1, -1)
    assert untouched(library, lambda: torch.vmap(linear, (0, None, None))(several, weight, bias))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        result = linear(dual, weight, bias)
        assert torch.autograd.forward_ad.unpack_dual(result).tangent is not None
    traced = torch.jit.trace(lambda x: linear(x, weight, bias), x)
    assert torch.equal(traced(x + 1), F.linear(x + 1, weight, bias))


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), (None, True)])
def test_the_environment_turns_it_off(monkeypatch, value, on):
    monkeypatch.delenv("KERNELWRIGHT_CUBLASLT", raising=False)
    if value is not None:
        monkeypatch.setenv("KERNELWRIGHT_CUBLASLT", value)
    # as a new process would see it
    spec = importlib.util.spec_from_file_location(f"{choosing.__package__}.again", SOURCE)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    monkeypatch.setattr(again, "serves", lambda device: True)
    monkeypatch.setattr(again, "LEAST_FLOP", 1)
    assert again._may_choose(*operands()) is on


def test_ever_new_shapes_are_not_tried_for_ever(pretend, monkeypatch):
    library = pretend(Known(10))
    monkeypatch.setattr(algorithms, "MAX_DECISIONS", 2)
    x, weight, bias = operands()
    for rows in (1, 2, 3, 4):
        linear(x[:rows], weight, bias)
    assert len(algorithms.decisions()) == 2
    assert not untouched(library, lambda: linear(x[:1], weight, bias))
    assert untouched(library, lambda: linear(x[:3], weight, bias))


def test_small_products_and_other_devices_are_never_asked_about(pretend, monkeypatch):
    library = pretend(Known(10))
    x, weight, bias = operands()
    monkeypatch.undo()
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    monkeypatch.setattr(algorithms, "LEAST_FLOP", 1)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert not library.launched
    assert not algorithms.decisions()
    assert "no product" in algorithms.describe()


def test_a_wrong_call_is_told_by_linear_itself(pretend):
    pretend(Known(10))
    x, weight, bias = operands()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        linear(x[:, :16].contiguous(), weight, bias)
    with pytest.raises(TypeError):
        linear([1.0], weight)

"""linear_gelu beyond what its declaration is held to: the epilogue is taken where it is right."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from kernelwright.ops import linear, linear_gelu

ON_GPU = torch.cuda.is_available()


def layer(*lead, inner=32, outer=24, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    return normal(*lead, inner), normal(outer, inner), normal(outer)


class Called(TorchFunctionMode):
    """Names of the torch functions that a block calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "erf"])
@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (2, 3, 2, 2), (0,), (2, 0)], ids=str)
def test_it_is_the_eager_chain_on_the_cpu(lead, approximate, biased):
    x, weight, bias = layer(*lead)
    bias = bias if biased else None
    form = "tanh" if approximate else "none"
    expected = F.gelu(F.linear(x, weight, bias), approximate=form)
    for how in ({}, {"exact": "torch"}, {"backend": "torch"}):
        assert torch.equal(linear_gelu(x, weight, bias, approximate, **how), expected)


def test_erf_and_tanh_are_told_apart():
    x, weight, bias = layer(64)
    assert not torch.equal(linear_gelu(x, weight, bias), linear_gelu(x, weight, bias, False))


def test_no_inner_width_gives_the_activation_of_the_bias():
    x, weight, bias = layer(3, inner=0)
    # of the whole result: PyTorch's functions may have other bits at the end of a vector
    expected = F.gelu(bias.expand(3, -1).contiguous(), approximate="tanh")
    assert torch.equal(linear_gelu(x, weight, bias), expected)


REFUSED = {
    "a CUDA GPU": {},
    "tanh": {"approximate": False, "device": "cuda"},
    "needs a bias": {"biased": False, "device": "cuda"},
    "float16 and bfloat16": {"dtype": torch.float32, "device": "cuda"},
    "empty": {"rows": 0, "device": "cuda"},
    "no gradient": {"grad": True, "device": "cuda"},
    "autocast": {"mixed": True, "device": "cuda"},
}


class OnCuda:
    """A tensor as the choice sees it, on a GPU that need not be there."""

    def __init__(self, shape, dtype, requires_grad, device):
        self.shape, self.dtype, self.requires_grad = shape, dtype, requires_grad
        self.is_cuda, self.device = device == "cuda", torch.device(device)

    def is_neg(self):
        return False


def problem(
    approximate=True,
    biased=True,
    dtype=torch.bfloat16,
    rows=4,
    grad=False,
    mixed=False,
    device="cpu",
):
    x = OnCuda((rows, 8), dtype, grad, device)
    weight, bias = OnCuda((6, 8), dtype, False, device), OnCuda((6,), dtype, False, device)
    return linear._problem(x, weight, bias if biased else None, approximate, mixed)


@pytest.mark.parametrize("reason", REFUSED)
def test_the_epilogue_is_refused_where_it_would_be_wrong(reason):
    assert reason in problem(**REFUSED[reason])


def test_the_epilogue_is_taken_where_it_is_right():
    assert problem(device="cuda") is None


@pytest.mark.parametrize(
    ("capability", "faster"), [((8, 0), True), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_the_epilogue_is_left_alone_on_sm_120(monkeypatch, capability, faster):
    monkeypatch.setattr(linear, "_capability", lambda device: capability)
    assert linear._faster(0) is faster


def test_the_epilogue_is_the_function_it_is_taken_for(monkeypatch):
    """The branch itself, on the CPU, where the same PyTorch function is the erf form."""
    monkeypatch.setattr(linear, "_kept", lambda *_: True)
    x, weight, bias = layer(2, 5)
    with Called() as called:
        got = linear_gelu(x[:, ::2], weight, bias)
    assert "_addmm_activation" in called.names
    torch.testing.assert_close(got, F.gelu(F.linear(x[:, ::2], weight, bias)))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"x": 3}, TypeError, "x is int"),
        ({"x": torch.ones(4, 32, dtype=torch.int32)}, TypeError, "x is torch.int32"),
        ({"x": torch.tensor(1.0)}, ValueError, "x has 0 dimensions"),
        ({"x": torch.ones(4, 31)}, ValueError, "weight takes width 32, x has 31"),
        ({"weight": torch.ones(32)}, ValueError, r"weight has shape \[32\]"),
        ({"weight": torch.ones(24, 32).half()}, TypeError, "weight is torch.float16, x is"),
        ({"weight": torch.ones(24, 32, device="meta")}, ValueError, "weight is on meta"),
        ({"bias": torch.ones(23)}, ValueError, "bias has 23 elements"),
        ({"bias": torch.ones(24).double()}, TypeError, "bias is torch.float64"),
        ({"approximate": "tanh"}, TypeError, "approximate is 'tanh'"),
        ({"backend": "triton"}, ValueError, "backend is 'triton', expected one of"),
        ({"backend": "cublaslt"}, ValueError, "'cublaslt' cannot run this: tensors are on cpu"),
        ({"exact": "diffusers"}, ValueError, "exact is 'diffusers'"),
    ],
)
def test_a_wrong_call_names_the_argument(change, error, said):
    arguments = dict(zip(("x", "weight", "bias"), layer(4), strict=True))
    for _ in range(2):  # nothing of the first failure is kept
        with pytest.raises(error, match=f"^linear_gelu: .*{said}"):
            linear_gelu(**arguments | change)
    linear_gelu(**arguments)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "erf"])
def test_it_compiles_to_one_graph_with_the_bits_of_eager(approximate, dynamic):
    torch._dynamo.reset()
    x, weight, bias = layer(3, 5, dtype=torch.bfloat16)

    def function(x):
        return linear_gelu(x, weight, bias, approximate)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 2):
        assert torch.equal(compiled(x[:rows]), function(x[:rows]))


def test_the_graph_node_keeps_its_schema():
    x, weight, bias = (t.requires_grad_() for t in layer(3, 5))
    torch.library.opcheck(torch.ops.kernelwright.linear_gelu, (x, weight, bias, True))
    torch.library.opcheck(torch.ops.kernelwright.linear_gelu, (x, weight, None, False))


@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "erf"])
def test_gradients_pass_gradcheck(approximate):
    leaves = [t.double().requires_grad_() for t in layer(3, inner=4, outer=2)]
    assert torch.autograd.gradcheck(lambda *a: linear_gelu(*a, approximate), leaves)


def test_autocast_casts_as_it_does_for_linear():
    x, weight, bias = layer(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_gelu(x.bfloat16(), weight, bias)
        expected = F.gelu(F.linear(x.bfloat16(), weight, bias), approximate="tanh")
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_epilogue_is_as_close_to_float64_as_eager(dtype):
    x, weight, bias = layer(2, 300, inner=512, outer=768, dtype=dtype, device="cuda")
    weight = weight * 512**-0.5
    truth = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    eager = (linear_gelu(x, weight, bias, exact="torch").double() - truth).abs().max()
    got = (linear_gelu(x, weight, bias, backend="cublaslt").double() - truth).abs().max()
    assert got <= eager

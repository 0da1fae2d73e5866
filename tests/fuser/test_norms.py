"""Norms in programs, with the statistics that their gradients read, and these gradients."""

import shutil
from dataclasses import replace

import pytest
import torch
from everything import share
from inject.trained import WIDTH, data, differing, model, twice
from inject.trained import gradients as gradients_of
from torch import nn

import kernelwright as kw
from fuser import cuda_on_cpu
from kernelwright.backends import Unsupported
from kernelwright.calibration import gradients
from kernelwright.fuser import interpreter, launching
from kernelwright.fuser.expression import Step
from kernelwright.fuser.index import Affine
from kernelwright.inject.training import blocks
from kernelwright.inject.training.block_programs import BlockPrograms
from kernelwright.ops import ways
from kernelwright.ops.row.order import gradient_order

aten = torch.ops.aten
ROWS, EPS = 3, 1e-6
RMS, LAYER = gradients.GRADIENTS


def fma(a, b, c):
    """Exact but for the last rounding: a product of two float32 numbers is one of float64."""
    return (a.double() * b.double() + c.double()).float()


def sum_of_rows(terms, factor):
    """ATen's: 128 threads take vectors of four in turn; lanes of a warp, then warps, by halves."""
    rows, width = terms.shape
    part = torch.zeros(rows, 128)
    for start in range(0, width, 512):
        vectors = terms[:, start : start + 512].view(rows, -1, 4)
        for i in range(4):
            own = part[:, : vectors.shape[1]]
            part[:, : vectors.shape[1]] = fma(factor.expand(own.shape), vectors[..., i], own)
    part = part.view(rows, 4, 32)
    while part.shape[-1] > 1:
        half = part.shape[-1] // 2
        part = part[..., :half] + part[..., half:]
    return ((part[:, 0] + part[:, 2]) + (part[:, 1] + part[:, 3])).view(rows, 1)


def in_atens_arithmetic(gradient, x, scale, mean=None, weight=None):
    width = torch.tensor(float(x.shape[-1]))
    g, v = gradient.float(), x.float()
    w = torch.ones(x.shape[-1]) if weight is None else weight.float()
    centred = v if mean is None else v - mean
    products = sum_of_rows((g * w) * centred, scale)
    found = fma(g, (width * w).expand(g.shape), -((scale * centred) * products))
    if mean is not None:
        found = found - sum_of_rows(g * w, torch.ones(()))
    return (found * ((1 / width) * scale)).to(x.dtype)


WAYS = [
    *((width, torch.bfloat16) for width in (64, 128, 280, 1536, 3072)),
    (1536, torch.float16),
    (320, torch.float32),
]


def operands(subject, width, dtype, weighted):
    draw = torch.Generator().manual_seed(width)
    x, gradient = (torch.randn(ROWS, width, generator=draw).to(dtype) for _ in range(2))
    given = {"gradient": gradient, "x": x}
    if subject == LAYER:
        given["mean"] = x.float().mean(-1, keepdim=True)
    centred = x.float() - given.get("mean", 0)
    given["scale"] = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return given | ({"weight": torch.rand(width, generator=draw).to(dtype)} if weighted else {})


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("subject", "width", "dtype"),
    [(s, *way) for n, s in enumerate(gradients.GRADIENTS) for way in share(WAYS, 2, start=n)],
)
def test_a_gradient_is_summed_in_atens_order(subject, width, dtype, weighted, tmp_path):
    given = operands(subject, width, dtype, weighted)
    program = gradients.program_of(subject, given)
    kernel = launching.kernel_of(program, launching.layout_of([program], given))
    result = torch.zeros_like(given["x"])
    cuda_on_cpu.launched(kernel, {**given, "result": result}, tmp_path)
    assert torch.equal(result, in_atens_arithmetic(**given))


def test_there_is_no_kernel_of_a_gradient_that_pytorch_takes_from_elsewhere():
    with ways.assuming("F.rms_norm", ways.QUACK), pytest.raises(Unsupported, match="QuACK"):
        gradient_order("F.rms_norm", 2048, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", ["without weights", "frozen", "all"])
def test_norms_and_their_gradients_are_in_programs(trained, dtype, monkeypatch):
    """The gradient of a norm's own weight is a sum over all rows: there PyTorch's op stays."""
    made, of = [], BlockPrograms.of
    monkeypatch.setattr(blocks.BlockPrograms, "of", lambda *a: made.append(of(*a)) or made[-1])
    eager = model()
    for block in eager.blocks if trained != "without weights" else ():
        block.norm1 = nn.LayerNorm(WIDTH).requires_grad_(trained == "all")
    eager, ours = twice(eager.to(dtype))
    kw.inject(ours)
    expected = gradients_of(eager, data(dtype=dtype))
    for _ in range(2):
        assert differing(gradients_of(ours, data(dtype=dtype)), expected) == []
    left = {op for p in made for half in (p.forward, p.backward) for op in half.plan.left}
    norms = {op for op in left if "norm" in op}
    assert norms == ({"aten.native_layer_norm_backward.default"} if trained == "all" else set())


def of_a_number(subject, given):
    """The program of a gradient whose rows of x are one number each, repeated; and its operands."""
    (store,) = (program := gradients.program_of(subject, given)).stores
    others = tuple(replace(e, index=(e.index[0], Affine())) for e in store.value.others)
    stores = (replace(store, value=replace(store.value, others=others)),)
    return replace(program, stores=stores), {**given, "x": given["x"][:, :1].clone()}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("subject", gradients.GRADIENTS)
def test_a_kernel_repeats_a_row_of_one_number(subject, tmp_path):
    given = operands(subject, 128, torch.bfloat16, weighted=True)
    program, given = of_a_number(subject, given)
    kernel = launching.kernel_of(program, launching.layout_of([program], given))
    result = torch.zeros_like(given["gradient"])
    cuda_on_cpu.launched(kernel, {**given, "result": result}, tmp_path)
    repeated = given["x"].expand(-1, 128).contiguous()
    assert torch.equal(result, in_atens_arithmetic(**{**given, "x": repeated}))


def test_the_interpreter_repeats_a_row_of_one_number():
    given = operands(LAYER, 128, torch.float32, weighted=True)
    program, given = of_a_number(LAYER, given)
    result = torch.zeros_like(given["gradient"])
    interpreter.run(program, given, {"result": result})
    repeated = given["x"].expand(-1, 128).contiguous()
    assert torch.equal(result, gradients.expected(LAYER, {**given, "x": repeated}))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_kernel_takes_a_gradient_that_is_one_number(tmp_path):
    """That of rows which nothing reads is zeros."""
    given = operands(LAYER, 128, torch.bfloat16, weighted=False)
    (store,) = (program := gradients.program_of(LAYER, given)).stores
    number = Step(aten.full.default, (0.5,), (), torch.bfloat16)
    stores = (replace(store, value=replace(store.value, x=number)),)
    program = replace(program, stores=stores)
    kernel = launching.kernel_of(program, launching.layout_of([program], given))
    result = torch.zeros_like(given["gradient"])
    given["gradient"] = torch.full_like(given["gradient"], 0.5)
    cuda_on_cpu.launched(kernel, {**given, "result": result}, tmp_path)
    assert torch.equal(result, in_atens_arithmetic(**given))

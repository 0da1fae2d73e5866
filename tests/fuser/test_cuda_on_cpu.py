"""The CUDA C++ of programs computes what their interpreter computes."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from fuser import blocks, cuda_on_cpu
from fuser.blocks import Small, drawn
from kernelwright.fuser import cuda_source, interpreter, launching, planning, recording
from kernelwright.fuser.program import Program

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def rotated_heads(x, weight, cos, sin):
    """Query and key of one projection, normalised by heads of 128 and rotated by halves."""
    q, k, _ = x.unflatten(-1, (3, 4, 128)).unbind(2)
    both = (F.rms_norm(t, (128,), weight) for t in (q, k))
    return tuple(blocks.rotated_by_halves(t, cos, sin).transpose(1, 2).contiguous() for t in both)


def rotated_pairs(x, weight, cos, sin):
    heads = F.layer_norm(x.unflatten(-1, (-1, 64)), (64,), weight)
    return blocks.rotated_in_pairs(heads, cos[:, None], sin[:, None])


def modulated(x, scale, gate):
    """A norm after a residual, with rows of which a thread has several vectors."""
    total = x + gate * x
    return total, F.layer_norm(total, (1536,)) * (1 + scale) + gate


def gradients(g, x):
    return aten.silu_backward(g, x) - aten.gelu_backward(x, g, approximate="tanh")


def gradient_of_norm(g, x):
    """Of a root mean square, as autograd writes it: with a sum along the row, and a cube."""
    x, g = x.float(), g.float()
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    of_mean = (g * x).sum(-1, keepdim=True) * r.pow(3) * -0.5
    return (g * r + of_mean.expand(x.shape) / 512 * (x.pow(1.0) * 2)).bfloat16()


TABLES = [drawn(5, 128, dtype=torch.float32, seed=s) for s in (1, 2)]
CASES = {
    "heads": (rotated_heads, drawn(2, 5, 1536), drawn(128), *TABLES),
    "pairs": (rotated_pairs, drawn(2, 5, 256), drawn(64), *(t[:, :64] for t in TABLES)),
    "rows": (modulated, drawn(2, 3, 1536), drawn(2, 1, 1536), drawn(2, 1, 1536, seed=1)),
    "uneven": (lambda x, y: F.silu(x) * y - x, drawn(3, 7, 280), drawn(3, 1, 280)),
    "table": (lambda x: F.gelu(x * 3, approximate="tanh"), drawn(257, 8192)),
    "activations' gradients": (gradients, drawn(3, 7, 280), drawn(3, 7, 280, seed=1)),
    "a norm's gradient": (gradient_of_norm, drawn(2, 3, 512), drawn(2, 3, 512, seed=1)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_computes_what_the_interpreter_does(case, tmp_path):
    function, *inputs = CASES[case]
    recorded = recording.record(Small(function), tuple(inputs), {})
    plan = planning.plan(recorded)
    names = [n.name for n in plan.graph.nodes if n.op == "placeholder"]
    tensors = {**plan.constants, **dict(zip(names, inputs, strict=True))}
    (program,) = (s for s in plan.steps if isinstance(s, Program))
    kernel = launching.Kernels()._kernel(program, launching._layout([program], plan.values))
    want = {
        s.target: torch.empty_strided(s.shape, s.strides, dtype=s.dtype) for s in program.stores
    }
    got = {name: torch.zeros_like(t) for name, t in want.items()}
    interpreter.run(program, tensors, want)
    cuda_on_cpu.launched(kernel, {**tensors, **got}, tmp_path)
    for name, t in want.items():
        # a sum in another order moves some elements to the number beside
        torch.testing.assert_close(got[name], t, rtol=2**-7, atol=2**-7)
        assert (got[name] != t).float().mean() < 0.02


@pytest.mark.parametrize("shape", [(2, 96, 130), (1, 65, 77)])
def test_a_copy_into_another_layout(shape, tmp_path):
    x = drawn(*shape)
    recorded = recording.record(Small(lambda x: x.transpose(1, 2).contiguous()), (x,), {})
    plan = planning.plan(recorded)
    copy = next(s for s in plan.steps if isinstance(s, Program))
    kernel = launching.kernel_of(copy, launching._layout([copy], plan.values))
    (store,) = copy.stores
    got = torch.zeros(shape[0], shape[2], shape[1], dtype=x.dtype)
    cuda_on_cpu.launched(kernel, {"arg0_1": x, store.target: got}, tmp_path)
    assert "tile" in kernel.code
    assert torch.equal(got, x.transpose(1, 2))


def test_heads_are_taken_together_and_halves_loaded_once():
    function, *inputs = CASES["heads"]
    recorded = recording.record(Small(function), tuple(inputs), {})
    plan = planning.plan(recorded)
    (program,) = (s for s in plan.steps if isinstance(s, Program))
    kernel = launching.Kernels()._kernel(program, launching._layout([program], plan.values))
    assert f"for (int r = 0; r < {cuda_source.TOGETHER[0]}; r++)" in kernel.code
    assert kernel.extents == [2, 4 // cuda_source.TOGETHER[0], 5]
    # query, key, weight, each at its own place and at that of its partner; cos and sin
    assert kernel.code.count(".load(") == 8


@pytest.mark.parametrize("size", [2, 3, 7, 48, 4608, 65535, 2**30 + 1])
def test_a_division_by_an_extent(size):
    _, factor, shift = cuda_source.divisor(size)
    assert factor < 2**32
    for n in (0, 1, size - 1, size, 3 * size - 1, 2**31 - 1, (2**31 - 1) // size * size - 1):
        assert n * factor >> 32 >> shift == n // size

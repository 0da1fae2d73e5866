"""The CUDA C++ of programs computes what their interpreter computes."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from fuser import blocks, cuda_on_cpu
from fuser.blocks import Small, drawn
from kernelwright.fuser import (
    cuda_source,
    interpreter,
    launching,
    planning,
    recording,
    row_sharing,
)
from kernelwright.fuser.eight_bit_rows import READ_IN_EIGHT_BITS, eight_bit_rows
from kernelwright.fuser.expression import ROUNDED
from kernelwright.fuser.program import Program
from kernelwright.ops import fp8

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


def rotated_by_matrices(x, matrices):
    """Pairs of a head, each by a matrix of its own."""
    pairs = x.unflatten(-1, (4, -1, 1, 2)).float()
    return (matrices[:, None] * pairs).sum(-1).flatten(-3).to(x.dtype)


def modulated(x, scale, gate):
    """A norm after a residual, with rows of which a thread has several vectors. The residual is
    stored, and so the norm reads it as it was rounded, whatever the tier."""
    total = (x + gate * x).bfloat16().to(x.dtype)
    return total, F.layer_norm(total, (1536,)) * (1 + scale) + gate


def with_statistics(x, gate):
    """A norm after a residual, and what its backward reads: that, and a value of each row."""
    total = (x + gate * x).bfloat16().to(x.dtype)
    r = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return total, r, (total * r).to(x.dtype)


def sum_and_heads(rotated):
    """What a layer and its adapter give is stored, and its heads are normalised and rotated: of
    each pair or half both elements are sums."""

    def run(x, y, cos, sin):
        total = (x + y).bfloat16().to(x.dtype)
        heads = total.unflatten(-1, (4, 64))
        r = torch.rsqrt(heads.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return total, rotated((heads * r).to(x.dtype), cos[:, None], sin[:, None])

    return run


def gradients(g, x):
    return aten.silu_backward(g, x) - aten.gelu_backward(x, g, approximate="tanh")


def gradient_of_norm(g, x):
    """Of a root mean square, as autograd writes it: with a sum along the row, and a cube."""
    x, g = x.float(), g.float()
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    of_mean = (g * x).sum(-1, keepdim=True) * r.pow(3) * -0.5
    return (g * r + of_mean.expand(x.shape) / 512 * (x.pow(1.0) * 2)).bfloat16()


def heads_of_tokens(qkv):
    """The keys of a packed projection for linear attention: channels before tokens, in float32."""
    return F.relu(qkv[..., 128:256].unflatten(-1, (2, 64)).permute(0, 2, 3, 1)).float().contiguous()


def tokens_of_heads(x):
    """Back, divided by the last row of each head."""
    divided = (x[:, :32] / (x[:, 32:] + 1)).unflatten(0, (2, 2))
    return divided.permute(0, 3, 1, 2).flatten(2).contiguous()


def two_across(x, y, z):
    """Rows of an odd width, of tensors that begin anywhere."""
    return ((x - y).transpose(1, 2) * z).contiguous()


TABLES = [drawn(5, 128, dtype=torch.float32, seed=s) for s in (1, 2)]
CASES = {
    "heads": (rotated_heads, drawn(2, 5, 1536), drawn(128), *TABLES),
    "pairs": (rotated_pairs, drawn(2, 5, 256), drawn(64), *(t[:, :64] for t in TABLES)),
    "matrices": (rotated_by_matrices, drawn(2, 5, 256), drawn(5, 32, 2, 2, dtype=torch.float32)),
    "rows": (modulated, drawn(2, 3, 1536), drawn(2, 1, 1536), drawn(2, 1, 1536, seed=1)),
    "statistics": (with_statistics, drawn(2, 3, 1536), drawn(2, 1, 1536)),
    "statistics of many rows": (with_statistics, drawn(5, 7, 128), drawn(5, 1, 128)),
    "pairs of a sum": (
        sum_and_heads(blocks.rotated_in_pairs),
        *(drawn(2, 5, 256, seed=s) for s in (0, 1)),
        *(t[:, :64] for t in TABLES),
    ),
    "uneven": (lambda x, y: F.silu(x) * y - x, drawn(3, 7, 280), drawn(3, 1, 280)),
    "table": (lambda x: F.gelu(x * 3, approximate="tanh"), drawn(257, 8192)),
    "padding": (lambda x: F.pad(x * 2, (0, 2), value=0.3), drawn(3, 7, 2)),
    "activations' gradients": (gradients, drawn(3, 7, 280), drawn(3, 7, 280, seed=1)),
    "across": (heads_of_tokens, drawn(2, 100, 384)),
    "across and back": (tokens_of_heads, drawn(4, 33, 70).abs()),
    "two across": (
        two_across,
        drawn(3, 71, 101)[..., 1:],
        drawn(3, 71, 101, seed=1)[..., :100],
        drawn(3, 1, 71),
    ),
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
    kernel = launching.Kernels()._kernel(program, launching.layout_of([program], plan.values))
    assert ("__shared__ __nv_bfloat16 tile0" in kernel.code) == ("across" in case)
    want = {
        s.target: torch.empty_strided(s.shape, s.strides, dtype=s.dtype) for s in program.stores
    }
    got = {name: torch.zeros_like(t) for name, t in want.items()}
    interpreter.run(program, tensors, want)
    cuda_on_cpu.launched(kernel, {**tensors, **got}, tmp_path)
    for name, t in want.items():
        if t.dtype == torch.float32 and t.shape[-1] == 1:  # made of a sum in another order
            torch.testing.assert_close(got[name], t, rtol=2**-20, atol=0)
            continue
        # a sum in another order moves some elements to the number beside
        torch.testing.assert_close(got[name], t, rtol=2**-7, atol=2**-7)
        assert (got[name] != t).float().mean() < 0.02


SPECIAL = torch.tensor([0.0, -0.0, 1.5, -1.5, 3.25, -7.5, 1e30, -1e30, 2e-40])
SPECIAL = torch.cat([SPECIAL, torch.tensor([float("nan"), float("inf"), -float("inf")])])
OF_SPECIAL = {
    "clamp from below": lambda x, y: x.clamp(min=-1.25) + y * 0,
    "clamp from above": lambda x, y: x.clamp(max=2.5) + y * 0,
    "clamp": lambda x, y: torch.clamp(x, -1.25, 2.5) + y * 0,
    "clamp_min": lambda x, y: torch.clamp_min(x, 0.5) + y * 0,
    "clamp_max": lambda x, y: torch.clamp_max(x, 0.5) + y * 0,
    "leaky_relu": lambda x, y: F.leaky_relu(x, 0.2) + y * 0,
    "leaky_relu, its slope": lambda x, y: F.leaky_relu(x) + y * 0,
    "relu": lambda x, y: F.relu(x) + y * 0,
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "reciprocal": lambda x, y: x.pow(-1) + y * 0,
    "root": lambda x, y: x.pow(0.5) + y * 0,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF_SPECIAL)
def test_zeros_infinities_and_what_is_no_number(name, dtype, tmp_path):
    pairs = torch.cartesian_prod(SPECIAL, SPECIAL).to(dtype)
    x, y = (pairs[:, i].reshape(12, 12).contiguous() for i in (0, 1))
    (got,) = stored(OF_SPECIAL[name], (x, y), tmp_path, exact=True)
    want = OF_SPECIAL[name](x, y)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_a_power_that_is_a_function_on_a_gpu(tmp_path):
    x = drawn(4, 512).abs() + 1
    (by_power,) = stored(lambda x: x.pow(-0.5) * 2, (x,), tmp_path, exact=True)
    (by_name,) = stored(lambda x: x.rsqrt() * 2, (x,), tmp_path, exact=True)
    assert torch.equal(by_power, by_name)


@pytest.mark.parametrize("exponent", [-2, -1.5, 4])
def test_powers_of_float32(exponent, tmp_path):
    x = drawn(4, 512, dtype=torch.float32).abs() + 0.1
    (got,) = stored(lambda x: x.pow(exponent) * 2, (x,), tmp_path, exact=True)
    torch.testing.assert_close(got, x.pow(exponent) * 2, rtol=2**-21, atol=0)


def test_a_copy_that_repeats_what_it_reads_is_no_transpose(tmp_path):
    """As HiDream's blocks, which give each patch the text of its picture."""
    x = drawn(1, 40, 48)

    def repeated(x):
        return x.expand(3, 40, 48).transpose(1, 2).contiguous()

    (got,) = stored(repeated, (x,), tmp_path, exact=True)
    assert torch.equal(got, repeated(x))


def stored(function, inputs, folder, stores=(), exact=False):
    """What the one program of a function stores, without rounding between its steps unless it is
    `exact`. Another plan of the same function `stores` the results of these nodes."""
    recorded = recording.record(Small(function), tuple(inputs), {})
    for node in recorded.graph.nodes:
        if node.name in stores:
            node.meta[ROUNDED] = True
    kernels = launching.Kernels(exact=exact)
    plan = planning.plan(recorded, kernels.why_not)
    names = [n.name for n in plan.graph.nodes if n.op == "placeholder"]
    tensors = {**plan.constants, **dict(zip(names, inputs, strict=True))}
    (program,) = (s for s in plan.steps if isinstance(s, Program))
    for s in program.stores:
        tensors[s.target] = torch.empty_strided(s.shape, s.strides, dtype=s.dtype)
    kernel = kernels._kernel(program, launching.layout_of([program], plan.values))
    cuda_on_cpu.launched(kernel, tensors, folder)
    return [tensors[s.target] for s in program.stores]


@pytest.mark.parametrize("case", [c for c in CASES if c != "table"])
def test_without_rounding_between_steps_a_kernel_is_as_near_as_its_store(case, tmp_path):
    function, *inputs = CASES[case]
    want = function(*(t.double() for t in inputs))
    want = want if isinstance(want, tuple) else [want]
    for got, expected in zip(stored(function, inputs, tmp_path), want, strict=True):
        torch.testing.assert_close(got.double(), expected.double(), rtol=2**-8, atol=2**-9)


def test_one_program_has_the_bits_of_two(tmp_path):
    """So a model gives the same bits whether a block does the first steps of the next or not."""
    x, scale, gate = CASES["rows"][1:]
    total, normed = stored(modulated, (x, scale, gate), tmp_path)
    (first,) = stored(lambda x, gate: x + gate * x, (x, gate), tmp_path)
    assert torch.equal(total, first)
    (second,) = stored(
        lambda x, scale, gate: F.layer_norm(x, (1536,)) * (1 + scale) + gate,
        (first, scale, gate),
        tmp_path,
    )
    assert torch.equal(normed, second)


def test_what_another_plan_stores_is_rounded(tmp_path):
    """A block stores a modulation that several of its programs read; the block before it, which
    does its first steps, makes it on its way."""
    x, table, embedding = CASES["rows"][1:]
    (apart,) = stored(lambda t, e: t + e, (table, embedding), tmp_path)
    (two,) = stored(lambda x, s: F.layer_norm(x, (1536,)) * (1 + s), (x, apart), tmp_path)

    def both(x, t, e):
        return F.layer_norm(x, (1536,)) * (1 + (t + e))

    (one,) = stored(both, (x, table, embedding), tmp_path, stores=("add",))
    assert torch.equal(one, two)
    (unrounded,) = stored(both, (x, table, embedding), tmp_path)
    assert not torch.equal(unrounded, two)


def gated(x):
    up, gate = x.chunk(2, -1)
    return up * F.silu(gate)


EIGHT_BITS = {
    "modulated": (modulated, drawn(2, 3, 1536), drawn(2, 1, 1536), drawn(2, 1, 1536, seed=1)),
    "gated": (gated, drawn(2, 5, 2 * 3072)),
    "zeros": (lambda x: x * 0 + 0, drawn(7, 1000)),
    "narrow": (lambda x: F.rms_norm(x, (64,)), drawn(3, 5, 64)),
    "float32": (lambda x: x * 2, drawn(9, 640, dtype=torch.float32)),
}


@pytest.mark.parametrize("case", EIGHT_BITS)
def test_a_kernel_stores_its_rows_in_eight_bits_too(case, tmp_path):
    """With the bits that a pass over what it has stored would give."""
    function, *inputs = EIGHT_BITS[case]
    recorded = recording.record(Small(function), tuple(inputs), {})
    (output,) = recorded.graph.find_nodes(op="output")
    output.args[0][-1].meta[READ_IN_EIGHT_BITS] = True
    kernels = launching.Kernels(exact=False)
    plan = planning.plan(recorded, kernels.why_not)
    (program,) = (s for s in plan.steps if isinstance(s, Program))
    (made,) = eight_bit_rows(program)
    names = [n.name for n in plan.graph.nodes if n.op == "placeholder"]
    tensors = {**plan.constants, **dict(zip(names, inputs, strict=True))}
    for s in program.stores:
        tensors[s.target] = torch.empty_strided(s.shape, s.strides, dtype=s.dtype)
    for name, shape, dtype in made.parts():
        tensors[name] = torch.empty(shape, dtype=dtype)
    kernel = kernels._kernel(program, launching.layout_of([program], plan.values))
    cuda_on_cpu.launched(kernel, tensors, tmp_path)
    rows, scale = fp8.reference.quantize(tensors[made.source])
    assert torch.equal(tensors[made.scale], scale)
    assert torch.equal(tensors[made.rows].view(torch.uint8), rows.view(torch.uint8))
    want = function(*(t.float() for t in inputs))
    want = want[-1] if isinstance(want, tuple) else want
    # it is rounded where something is stored, and nowhere else
    torch.testing.assert_close(tensors[made.source].float(), want, rtol=2**-8, atol=2**-10)


def test_every_number_of_eight_bits_is_rounded_to_as_pytorch_rounds(tmp_path):
    """The emulated instruction: all bfloat16 numbers, at the scale at which 448 is the largest."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = bits[bits.float().abs() <= 448]
    x = torch.cat([x, x.new_full((-len(x) % 60,), 0.0)]).view(-1, 60)
    x = torch.cat([x, x.new_full((len(x), 4), 448.0)], -1)
    recorded = recording.record(Small(lambda x: x + 0), (x,), {})
    (output,) = recorded.graph.find_nodes(op="output")
    output.args[0][0].meta[READ_IN_EIGHT_BITS] = True
    plan = planning.plan(recorded)
    (program,) = (s for s in plan.steps if isinstance(s, Program))
    (made,) = eight_bit_rows(program)
    (given,) = (n.name for n in plan.graph.nodes if n.op == "placeholder")
    tensors = {given: x, made.source: torch.empty_like(x)}
    tensors |= {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in made.parts()}
    layout = launching.layout_of([program], plan.values)
    cuda_on_cpu.launched(launching.kernel_of(program, layout, False), tensors, tmp_path)
    want = x.float().to(torch.float8_e4m3fn)
    assert torch.equal(tensors[made.rows].float(), want.float())


@pytest.mark.parametrize("shape", [(2, 96, 130), (1, 65, 77)])
def test_a_copy_into_another_layout(shape, tmp_path):
    x = drawn(*shape)
    recorded = recording.record(Small(lambda x: x.transpose(1, 2).contiguous()), (x,), {})
    plan = planning.plan(recorded)
    copy = next(s for s in plan.steps if isinstance(s, Program))
    kernel = launching.kernel_of(copy, launching.layout_of([copy], plan.values))
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
    kernel = launching.Kernels()._kernel(program, launching.layout_of([program], plan.values))
    assert f"for (int r = 0; r < {row_sharing.TOGETHER[0]}; r++)" in kernel.code
    assert kernel.extents == [2, 4 // row_sharing.TOGETHER[0], 5]
    # query, key, weight, each at its own place and at that of its partner; cos and sin
    assert kernel.code.count(".load(") == 8


@pytest.mark.parametrize("size", [2, 3, 7, 48, 4608, 65535, 2**30 + 1])
def test_a_division_by_an_extent(size):
    _, factor, shift = cuda_source.divisor(size)
    assert factor < 2**32
    for n in (0, 1, size - 1, size, 3 * size - 1, 2**31 - 1, (2**31 - 1) // size * size - 1):
        assert n * factor >> 32 >> shift == n // size

"""Programs as kernels: PyTorch's bits, op by op over every 16-bit number, and block by block."""

import pytest
import torch
import torch.nn.functional as F
from fuser import blocks
from fuser.blocks import Small
from inject.harness import check_fused
from torch import fx, nn

import kernelwright as kw
from kernelwright import models
from kernelwright.fuser import planning, recording, running
from kernelwright.fuser.attention_by_lengths import attend, read
from kernelwright.fuser.eight_bit_rows import READ_IN_EIGHT_BITS
from kernelwright.fuser.launching import Kernels
from kernelwright.inject.graphs.host_reads import OTHER_VALUES
from kernelwright.ops import fp8

pytestmark = pytest.mark.gpu
HALF = [torch.bfloat16, torch.float16]


def launched(module, *args):
    """The result of a forward whose every op is in a kernel."""
    recorded = recording.record(module, args, {})
    kernels = Kernels()
    plan = planning.plan(recorded, kernels.why_not)
    assert not plan.refused
    programs = [step for step in plan.steps if not isinstance(step, fx.Node)]
    run = kernels.launched(programs, plan.values, torch.device("cuda", 0))

    def runner(program, given, outputs):
        run[id(program)]({**given, **outputs})

    inputs = recorded.inputs(module, args, {})
    return recorded.result(running.Executable(plan, runner)(inputs)), plan


def same(a, b):
    assert a.dtype == b.dtype
    assert a.stride() == b.stride()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def every_number(dtype):
    return (
        torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype).reshape(256, 256)
    )


UNARY = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "power of two": lambda x: x.pow(2),
    "power of a half": lambda x: x.pow(0.5),
    "power of minus a half": lambda x: x.pow(-0.5),
    "power of minus one": lambda x: x.pow(-1),
    "not below": lambda x: x.clamp(min=-1.3),
    "not above": lambda x: torch.clamp_max(x, 0.7),
    "between": lambda x: x.clamp(-1.3, 0.7),
    "leaky relu": lambda x: F.leaky_relu(x, 0.2),
    "plus one": lambda x: 1 + x,
    "scaled": lambda x: x * 0.1,
    "divided": lambda x: x / 3.0,
    "float": lambda x: x.float(),
    "compared": lambda x: x > 0.3,
    "chosen": lambda x: torch.where(x > 0, x, x * 2),
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_ops_over_every_16_bit_number(name, dtype):
    x = every_number(dtype)
    got, _ = launched(Small(UNARY[name]), x)
    assert same(got, UNARY[name](x))


@pytest.mark.parametrize("name", [n for n in UNARY if n != "float"])
def test_ops_in_float32(name):
    x = torch.randn(1 << 14, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    got, _ = launched(Small(UNARY[name]), x * 4)
    assert same(got, UNARY[name](x * 4))


@pytest.mark.parametrize("exponent", [-2, -1.5, 1.7, 4])
def test_a_power_of_float32(exponent):
    x = torch.randn(1 << 14, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    got, _ = launched(Small(lambda x: x.abs().pow(exponent)), x)
    assert same(got, x.abs().pow(exponent))


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("number", [3, 7.0, 127, 192, 0.1, -49.0, 1e-30, 3e38, 0])
def test_a_division_by_a_number(number, dtype):
    x = torch.randn(1 << 10, 64, device="cuda").to(dtype)
    got, _ = launched(Small(lambda x: x / number), x)
    assert same(got, x / number)


BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "mixed": lambda a, b: a.float() * b + a,
}


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_ops_of_two_operands(name, dtype):
    a = torch.randn(512, 256, device="cuda").to(dtype)
    b = torch.randn(512, 256, device="cuda").to(dtype)
    a[::7, ::5], b[::3, ::4] = float("nan"), float("nan")
    got, _ = launched(Small(BINARY[name]), a, b)
    assert same(got, BINARY[name](a, b))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_rotation_by_complex_numbers(dtype):
    x = torch.randn(2, 300, 3, 128, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(2, 300, 1, 64, device="cuda", dtype=torch.float64)
    turned = torch.polar(torch.ones_like(angles), angles).to(dtype)
    got, plan = launched(Small(lambda x, a: blocks.rotated_as_complex(x, a)), x, turned)
    assert same(got, blocks.rotated_as_complex(x, turned))
    assert len(plan.steps) == 1


@pytest.mark.parametrize("shape", [(2, 96, 160), (1, 67, 129), (3, 33, 64)])
def test_tensors_that_lie_across_the_rows(shape):
    batch, tokens, width = shape
    x = torch.randn(batch, width, tokens, device="cuda").bfloat16().transpose(1, 2)
    y = torch.randn(batch, tokens, width, device="cuda").bfloat16()

    def forward(x, y):
        return x + y * 2

    got, _ = launched(Small(forward), x, y)
    assert same(got, forward(x, y))


@pytest.mark.parametrize("width", [64, 128, 768, 1536, 3072, 4096, 5120, 6144])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms_and_what_is_around_them(norm, width):
    x = torch.randn(3, 77, width, device="cuda").bfloat16()
    weight, scale = (
        torch.randn(width, device="cuda").bfloat16(),
        torch.randn(3, 1, width, device="cuda").bfloat16(),
    )

    def forward(x, weight, scale):
        y = (
            F.rms_norm(x, (width,), weight, 1e-6)
            if norm == "rms"
            else F.layer_norm(x, (width,), weight)
        )
        return y * (1 + scale) + x

    got, plan = launched(Small(forward), x, weight, scale)
    assert same(got, forward(x, weight, scale))
    assert len(plan.steps) == 1


def modulated(x, scale, gate):
    total = x + gate * x
    return total, F.layer_norm(total, x.shape[-1:]) * (1 + scale) + gate


@pytest.mark.parametrize("width", [64, 1536, 2048, 6144])
def test_rows_in_eight_bits_are_those_of_a_pass_of_their_own(width):
    how = {"device": "cuda", "dtype": torch.bfloat16}
    x, scale, gate = torch.randn(2, 300, width, **how), *torch.randn(2, 2, 1, width, **how)
    recorded = recording.record(Small(modulated), (x, scale, gate), {})
    (output,) = recorded.graph.find_nodes(op="output")
    output.args[0][1].meta[READ_IN_EIGHT_BITS] = True
    kernels, kept = Kernels(exact=False), []
    plan = planning.plan(recorded, kernels.why_not)
    (program,) = plan.steps
    run = kernels.launched([program], plan.values, torch.device("cuda", 0))

    def runner(program, given, outputs):
        run[id(program)]({**given, **outputs})

    execute = running.Executable(plan, runner, keep_rows=lambda *made: kept.append(made))
    _, normed = execute(recorded.inputs(Small(modulated), (x, scale, gate), {}))
    ((of, rows, scales),) = kept
    assert of is normed
    expected, expected_scales = fp8.quantize(normed)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
@pytest.mark.parametrize("numerics", ["fused", "fp8"])
@pytest.mark.parametrize("name", ["ltx-video", "flux-dev", "sd3.5-medium", "flux2-dev"])
def test_every_call_gives_the_same_bits(name, numerics, graphs):
    """Also once blocks do the first steps of the next."""
    how = {"tiny": True, "dtype": torch.bfloat16, "device": "cuda"}
    model, given = models.build(name, **how), models.inputs(name, **how)
    with torch.no_grad(), kw.injected(model, numerics=numerics, recipes=False, graphs=graphs) as r:
        first = model(**given)
        for _ in range(5):
            assert _equal(model(**given), first)
    assert not r.problems
    assert all(line.apart is None for line in r.blocks)


def test_a_block_of_no_library():
    model = blocks.Block(width=256).cuda().bfloat16().eval()
    table = torch.randn(300, 128, device="cuda")
    given = (
        torch.randn(2, 300, 256, device="cuda").bfloat16(),
        torch.randn(2, 256, device="cuda").bfloat16(),
    )
    with torch.no_grad():
        want = model(*given, table, table)
        got, _ = launched(model, *given, table, table)
    assert same(got, want)


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
@pytest.mark.parametrize("name", list(models.presets()))
def test_presets_without_recipes_have_the_bits_of_eager(name, graphs):
    how = {"tiny": True, "dtype": torch.bfloat16, "device": "cuda"}
    model, given = models.build(name, **how), models.inputs(name, **how)
    with torch.no_grad():
        want = model(**given)
        report = kw.inject(model, recipes=False, graphs=graphs)
        for _ in range(3):
            got = model(**given)
            assert _equal(got, want)
    assert not report.problems
    kw.restore(model)


def _equal(a, b):
    from kernelwright.inject.runtime.sites import equal

    return equal(a, b)


class ReadsOnHost(nn.Module):
    """A mask that is read on the host, and a table that is copied from it."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 64)
        self.table = torch.randn(128, 64)

    def forward(self, x, mask):
        rows = self.proj(x) + self.table[: x.shape[0]].to(x.device)
        chosen = rows[mask]
        return chosen * int(mask.sum()) + torch.tensor([1.0, 2.0] * 32, device=x.device)


@torch.no_grad()
def test_graphs_of_forwards_that_read_on_the_host():
    from kernelwright.inject.graphs.graphs import Graphs

    model, graphs = ReadsOnHost().eval(), Graphs()
    model.proj.cuda()
    mask = torch.arange(32, device="cuda") % 3 == 0
    for seed in range(5):
        x = torch.randn(32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        assert torch.equal(graphs(model, type(model).forward, (x, mask), {}), model(x, mask))
    assert graphs.captured == 1, graphs.reasons
    other = ~mask
    assert torch.equal(graphs(model, type(model).forward, (x, other), {}), model(x, other))
    model.table.mul_(2)
    assert torch.equal(graphs(model, type(model).forward, (x, mask), {}), model(x, mask))


@pytest.mark.parametrize("name", ["hunyuan-video", "hunyuan-video-1.5"])
@torch.no_grad()
def test_graphs_of_attention_by_lengths_follow_the_mask(name):
    how = {"tiny": True, "dtype": torch.bfloat16, "device": "cuda"}
    model, given = models.build(name, **how), models.inputs(name, **how)
    check_fused(model, given, recipes=False)
    mask = given["encoder_attention_mask"]
    longer = torch.zeros_like(mask)
    longer[:, :5] = 1
    both = [{**given, "encoder_attention_mask": m} for m in (mask, longer)]
    with kw.injected(model, numerics="fused", recipes=False):
        model(**given)
        want = [model(**inputs) for inputs in both]
    assert not _equal(*want)
    with kw.injected(model, numerics="fused", recipes=False, graphs=True) as report:
        for _ in range(3):
            assert _equal(model(**both[0]), want[0])
        (graphs,) = report.graphs
        assert graphs.captured == 1, graphs.reasons
        for _ in range(2):
            assert _equal(model(**both[1]), want[1])
            assert _equal(model(**both[0]), want[0])
        assert set(graphs.reasons) == {OTHER_VALUES}
    assert not report.problems
    assert any("attention by lengths" in str(line) for line in report.blocks)


@torch.no_grad()
def test_attention_by_lengths_has_the_layout_of_what_was_recorded():
    """Kernels with a mask and without one may leave heads and tokens in another order."""
    query, key, value = torch.randn(3, 1, 300, 4, 64, device="cuda").bfloat16().transpose(2, 3)
    for rows in (1, 300):
        mask = torch.zeros(1, 1, rows, 300, dtype=torch.bool, device="cuda")
        mask[:, :, :200, :200] = True
        like = F.scaled_dot_product_attention(query, key, value, mask)
        for layout in (like, like.contiguous(), like.transpose(1, 2).contiguous().transpose(1, 2)):
            got = attend(
                *(query, key, value, mask, 0.0, False, None, False, ()),
                *(read(mask, 300, 300), layout),
            )
            assert got.stride() == layout.stride()
            want = F.scaled_dot_product_attention(*(t.double() for t in (query, key, value)), mask)
            errors = [(t.double() - want)[:, :, :200].abs().max() for t in (got, like)]
            assert errors[0] <= errors[1] + 2**-9 * want.abs().max()  # one rounding more
            assert rows == 1 or not got[:, :, 200:].any()


@torch.no_grad()
def test_the_backend_of_torch_compile():
    how = {"tiny": True, "dtype": torch.bfloat16, "device": "cuda"}
    model, given = models.build("flux2-dev", **how), models.inputs("flux2-dev", **how)
    from kernelwright.inject.compile_backend import kernelwright

    compiled = torch.compile(model, backend=kernelwright)
    for _ in range(2):
        assert torch.equal(compiled(**given)[0], model(**given)[0])

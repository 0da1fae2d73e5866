"""Tensors that lie across rows are copied into them; what blocks share is made once."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import kernelwright as kw
from fuser.blocks import Small, drawn
from kernelwright.backends import cuda
from kernelwright.fuser import interpreter, planning, recording, running
from kernelwright.fuser.eight_bit_rows import READ_IN_EIGHT_BITS, eight_bit_rows
from kernelwright.fuser.expression import Load
from kernelwright.fuser.launching import Kernels, kernel_of, layout_of
from kernelwright.fuser.layouts import IN_ROWS


def planned(module, *args):
    recorded = recording.record(module, args, {})
    return recorded, planning.plan(recorded)


def copies(plan):
    """What is copied to where."""
    found = []
    for step in plan.steps:
        if isinstance(step, fx.Node):
            continue
        (store, *_) = step.stores
        if isinstance(store.value, Load) and len(step.stores) == 1:
            found.append((step.loads[0], store.target))
    return found


def across(*shape):
    """A tensor whose last two dimensions lie the other way round, as a convolution leaves them."""
    return drawn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def check(module, *args):
    recorded, plan = planned(module, *args)
    got = recorded.result(running.Executable(plan)(recorded.inputs(module, args, {})))
    want = module(*args)
    assert torch.equal(got, want)
    assert got.stride() == want.stride()
    return plan


def test_a_norm_reads_a_copy_that_lies_in_rows():
    plan = check(Small(lambda x: F.layer_norm(x, (64,)) * 2), across(2, 48, 64))
    assert copies(plan) == [("arg0_1", "arg0_1" + IN_ROWS)]


def test_a_program_without_sums_reads_what_lies_across_by_tiles():
    def forward(x):
        return (x.transpose(1, 2) * 2).contiguous()

    plan = check(Small(forward), drawn(2, 48, 64))
    assert copies(plan) == []
    (program,) = plan.steps
    assert "tile0" in kernel_of(program, layout_of([program], plan.values)).code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_of_tiles_compiles(dtype):
    pytest.importorskip("cuda.core")
    x, y = drawn(2, 48, 64).to(dtype), drawn(2, 64, 48).to(dtype)
    _, plan = planned(Small(lambda x, y: (x.transpose(1, 2) * y).float().contiguous()), x, y)
    (program,) = plan.steps
    code = kernel_of(program, layout_of([program], plan.values)).code
    assert cuda.compile_cubin(code, "sm_90")


def test_a_result_that_others_read_is_copied_back():
    x, y = across(2, 48, 64), drawn(2, 48, 64)
    plan = check(Small(lambda x, y: x + y), x, y)
    (into, back) = copies(plan)
    assert into[1] == "arg0_1" + IN_ROWS
    assert back == ("add" + IN_ROWS, "add")


def test_a_result_that_only_programs_read_stays_in_rows():
    def forward(x, y, weight):
        z = x + y
        return F.linear(F.layer_norm(z, (64,)), weight).cumsum(-1) + z.mean(-1, keepdim=True)

    plan = check(Small(forward), across(2, 48, 64), drawn(2, 48, 64), drawn(64, 64))
    assert not any(target == "add" for _, target in copies(plan))


def test_complex_numbers_are_read_where_they_lie():
    """Kernels read them in pairs, and have no copy of them."""
    angles = drawn(1, 48, 32, dtype=torch.float32)
    turned = torch.polar(torch.ones_like(angles), angles)
    x = drawn(1, 32, 2, 48, dtype=torch.float32).permute(0, 3, 1, 2)  # tokens next to each other

    def forward(x, turned):
        pairs = torch.view_as_complex(x.contiguous())
        return x * 2 + torch.view_as_real(pairs * turned)

    _, plan = planned(Small(forward), x, turned)
    assert copies(plan) == []
    programs = [step for step in plan.steps if not isinstance(step, fx.Node)]
    assert [Kernels().why_not(program, plan.values) for program in programs] == [None]


def test_what_is_copied_into_rows_is_stored_in_eight_bits_by_its_program_and_by_no_copy():
    x, y = across(2, 48, 64), drawn(2, 48, 64)

    def forward(x, y):
        z = x + y
        return F.layer_norm(z, (64,)) * 2, z

    recorded = recording.record(Small(forward), (x, y), {})
    (output,) = recorded.graph.find_nodes(op="output")
    for node in output.args[0]:
        node.meta[READ_IN_EIGHT_BITS] = True
    plan = planning.plan(recorded, Kernels(exact=False).why_not)
    assert copies(plan)
    eight = [made.source for step in plan.steps for made in eight_bit_rows(step)]
    assert eight == [output.args[0][0].name]


def test_all_that_lie_across_are_walked_along_as_they_are():
    plan = check(Small(lambda x, y: x * y + 1), across(2, 48, 64), across(2, 48, 64))
    assert copies(plan) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool])
def test_the_kernel_of_a_copy_compiles(dtype):
    pytest.importorskip("cuda.core")
    x, y = across(2, 48, 64).to(dtype), drawn(2, 48, 64).to(dtype)
    recorded = recording.record(Small(lambda x, y: torch.maximum(x, y)), (x, y), {})
    plan = planning.plan(recorded)
    kernels, made = Kernels(), 0
    for step in plan.steps:
        if isinstance(step.stores[0].value, Load) and step.stores[0].target.endswith(IN_ROWS):
            assert kernels.why_not(step, plan.values) is None
            (kernel,) = kernels._known.values()
            assert "__shared__ Pair tile" in kernel.code
            assert cuda.build(kernel.code, "sm_90")[0]
            made += 1
    assert made == 1


class Masked(nn.Module):
    """Attention with a mask that is made of a given one."""

    def __init__(self):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(32), nn.Linear(32, 32)
        self.parts = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))

    def forward(self, x, mask):
        pairs = (mask[:, None, :, None] & mask[:, None, None, :]) | mask.logical_not()[
            :, None, None
        ]
        q = self.proj(self.norm(x))[:, None]
        y = F.scaled_dot_product_attention(q, q, q, pairs)[:, 0]
        return x + self.parts(F.silu(y) * 2 + 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x


def test_what_is_made_of_a_mask_is_made_once_for_all_blocks(monkeypatch):
    model, ran = Model().eval(), []
    x, mask = drawn(2, 8, 32, dtype=torch.float32), torch.arange(8)[None].expand(2, 8) < 5
    with torch.no_grad():
        want = model(x, mask)
        report = kw.inject(model)
        model(x, mask)  # first sight
        own = interpreter.run

        def counted(program, given, outputs):
            ran.append(next(iter(outputs.values())).dtype)
            own(program, given, outputs)

        monkeypatch.setattr(interpreter, "run", counted)
        assert torch.equal(model(x, mask), want)
        other = mask.roll(1, -1)
        assert torch.equal(model(x, other), _eagerly(model, x, other))
    assert not report.problems
    assert ran.count(torch.bool) == 2  # one for each mask


def _eagerly(model, *args):
    kw.restore(model)
    result = model(*args)
    return result

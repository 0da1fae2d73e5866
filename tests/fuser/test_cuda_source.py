"""The CUDA source of a program: what it is made of, and that it compiles for every architecture."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fuser import blocks
from fuser.blocks import Small, drawn
from kernelwright.backends import Unsupported, cuda
from kernelwright.fuser import cuda_source, launching, planning, recording, running

pytest.importorskip("cuda.core")


def kernels(module, *args):
    recorded = recording.record(module, args, {})
    nodes = {n.name: n.meta.get("val") for n in recorded.graph.nodes}
    found = []
    for step in planning.plan(recorded).steps:
        if isinstance(step, fx.Node):
            continue
        tensors = {n: cuda_source.Tensor(nodes[n].stride(), nodes[n].dtype) for n in step.loads}
        tensors |= {s.target: cuda_source.Tensor(s.strides, s.dtype) for s in step.stores}
        found.append(cuda_source.kernel(step, tensors))
    return found


def block():
    inputs = drawn(2, 48, 128), drawn(2, 128), drawn(48, 64, dtype=torch.float32)
    return kernels(blocks.Block(width=128).bfloat16(), *inputs, drawn(48, 64, dtype=torch.float32))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_a_block_compiles(arch):
    for kernel in block():
        cubin, _ = cuda.build(kernel.code, arch)
        assert cubin


def test_the_source_does_not_depend_on_the_number_of_rows():
    def codes(tokens):
        cos = drawn(tokens, 64, dtype=torch.float32)
        given = drawn(2, tokens, 128), drawn(2, 128), cos, cos
        return [k.code for k in kernels(blocks.Block(width=128).bfloat16(), *given)]

    assert codes(48) == codes(80)


def test_neighbours_are_loaded_and_stored_together():
    (kernel,) = kernels(Small(lambda x: F.silu(x) * 2), drawn(4, 64))
    assert "Vec<__nv_bfloat16, 8> v0;" in kernel.code
    assert "store_whole" in kernel.code


def test_partners_of_a_rotation_come_from_the_same_vector():
    cos = drawn(24, 1, 16, dtype=torch.float32)
    (kernel,) = kernels(Small(lambda x: blocks.rotated_in_pairs(x, cos, cos)), drawn(2, 24, 3, 16))
    assert kernel.code.count("Vec<__nv_bfloat16") == 2  # one for x, one for the result


def test_rows_that_are_not_aligned_are_loaded_one_by_one():
    x = drawn(4, 67)[:, 1:65]
    (kernel,) = kernels(Small(lambda x: x * 2), x)
    assert "v0.load" not in kernel.code


def test_every_step_is_rounded_to_its_dtype():
    (kernel,) = kernels(Small(lambda x: x.sin().cos()), drawn(4, 64))
    assert "rounded<__nv_bfloat16>(e0)" in kernel.code


def test_sums_and_products_of_16_bits_are_made_in_pairs():
    (kernel,) = kernels(Small(lambda x: (x + 1) * x), drawn(4, 64))
    assert "add_pairs<__nv_bfloat16>(v0.word(0), 0x3f803f80u)" in kernel.code
    assert "rounded" not in kernel.code
    assert "pair<" not in kernel.code
    # a number that bfloat16 does not have is added in float32
    (kernel,) = kernels(Small(lambda x: x + 0.1), drawn(4, 64))
    assert "add_pairs" not in kernel.code


def test_two_sums_of_a_row_do_not_share_memory_at_once():
    (kernel,) = kernels(
        Small(lambda x: F.layer_norm(F.layer_norm(x, (1024,)) + 1, (1024,))), drawn(4, 1024)
    )
    assert kernel.code.index("sum") < kernel.code.index("__syncthreads();")


def test_the_arguments_of_a_launch():
    (kernel,) = kernels(Small(lambda x: x[:, 2:] * 2), drawn(4, 6, 32))
    launch = launching.launch_of(kernel)
    assert launch.grid * launch.block >= 16 * kernel.row_threads
    assert len(launch.pointers) == 2
    assert dict(kernel.pointers)[next(n for n, _ in kernel.pointers)] in (0, 64)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.long() + 1, "whole numbers"),
        (lambda x: x.clamp(max=float("inf")), "between other than finite numbers"),
        (lambda x: x.pow(1.7), "a power of 1.7"),
        (lambda x: x.pow(x + 1), "an exponent that is no number"),
        (lambda x: 2 ** (x + 1), "an exponent that is no number"),
        (lambda x: F.layer_norm(x, (32,), None, x[0]), "a bias and no weight"),
    ],
)
def test_what_has_no_code_says_so(function, why):
    with pytest.raises(Unsupported, match=why):
        kernels(Small(function), drawn(4, 32))


def test_a_division_by_a_number_is_a_product_as_on_a_gpu():
    (kernel,) = kernels(Small(lambda x: x / 3), drawn(4, 64, dtype=torch.float32))
    assert "0.3333333432674408f" in kernel.code
    assert "__fdiv_rn" not in kernel.code
    (kernel,) = kernels(Small(lambda x, y: x / y), *(drawn(4, 64, dtype=torch.float32),) * 2)
    assert "__fdiv_rn" in kernel.code


def test_a_conjugate_that_is_only_noted_stays_pytorchs():
    """Its memory holds other numbers than its value."""
    x, angles = drawn(4, 6, 32, dtype=torch.float32), drawn(4, 6, 16, dtype=torch.float32)
    turned = torch.polar(torch.ones_like(angles), angles)

    def forward(x, turned):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turned.conj()).flatten(-2)

    recorded = recording.record(Small(forward), (x, turned), {})
    plan = planning.plan(recorded, launching.Kernels().why_not)
    assert not any("_conj" in s.loads for s in plan.steps if not isinstance(s, fx.Node))
    got = running.Executable(plan)(recorded.inputs(Small(forward), (x, turned), {}))
    assert torch.equal(recorded.result(got), forward(x, turned))

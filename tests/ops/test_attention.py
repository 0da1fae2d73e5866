"""Attention beyond what its declaration is held to: masks, strides, lengths, graphs, gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from attended import LOWEST, hold, tensors
from torch._dynamo.testing import CompileCounterWithBackend

from kernelwright.backends import Target, Unsupported
from kernelwright.backends.triton import interpreting
from kernelwright.ops import attention
from kernelwright.ops.attention import custom_kernels, launch, reference, tiles
from kernelwright.ops.op import Call

pytestmark = pytest.mark.usefixtures("rounding_interpreter")
interpreted = pytest.mark.skipif(not interpreting(), reason="a GPU is here: tests/gpu runs kernels")
quiet = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
ON_CPU = ["auto", "torch", "math", pytest.param("triton", marks=interpreted)]
HALVES = [torch.float16, torch.bfloat16]


def test_the_reference_is_the_formula():
    query, key, value = tensors(1, 2, 1, 3, 4, 5, dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True]] * 3)
    got = reference.attention(query, key, value, mask, 0.3, causal=True)
    for h in range(2):
        for i in range(3):
            seen = [j for j in range(i + 1) if mask[i, j]]
            weights = [math.exp(float(query[0, h, i] @ key[0, 0, j]) * 0.3) for j in seen]
            expected = sum(w * value[0, 0, j] for w, j in zip(weights, seen, strict=True))
            torch.testing.assert_close(got[0, h, i], expected / sum(weights))


@interpreted
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 130), (16, 129), (65, 257), (140, 64), (3, 128)]
)
def test_triton_takes_any_lengths(queries, keys, causal):
    args = tensors(1, 1, 1, queries, keys, 16, dtype=torch.float16)
    hold(attention(*args, causal=causal, backend="triton"), *args, causal=causal)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 8, 16, 40, 72, 80, 96, 160, 256])
def test_triton_takes_any_head_dim(dim, dtype):
    args = tensors(1, 2, 1, 9, 20, dim, value_dim=max(1, dim // 2), dtype=dtype)
    got = attention(*args, backend="triton")
    assert got.shape == (1, 2, 9, max(1, dim // 2))
    hold(got, *args)


MASKS = {
    "[Sk]": (20,),
    "[Sq, 1]": (9, 1),
    "[Sq, Sk]": (9, 20),
    "[H, Sq, Sk]": (2, 9, 20),
    "[B, 1, 1, Sk]": (3, 1, 1, 20),
    "[1, H, 1, Sk]": (1, 2, 1, 20),
    "[B, H, Sq, 1]": (3, 2, 9, 1),
    "[B, H, Sq, Sk]": (3, 2, 9, 20),
    "[1, 1]": (1, 1),
}


@interpreted
@pytest.mark.parametrize("kind", ["bool", "float", "float32 beside float16"])
@pytest.mark.parametrize("shape", MASKS)
def test_triton_takes_every_mask_that_broadcasts(shape, kind):
    args = tensors(3, 2, 2, 9, 20, 16, dtype=torch.float16)
    values = torch.randn(MASKS[shape], generator=torch.Generator().manual_seed(0))
    if kind == "bool":
        mask = values > -0.5
    else:
        mask = values if kind.startswith("float32") else values.half()
    for causal in (False, True):
        hold(attention(*args, mask, causal=causal, backend="triton"), *args, mask, causal=causal)


@interpreted
def test_triton_reads_a_mask_of_any_strides():
    args = tensors(2, 2, 2, 9, 20, 16)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 2, 20, 9, generator=generator)
    for mask in (
        wide.transpose(2, 3),
        wide.transpose(2, 3) > 0,
        wide[:, :1, :, 0].unsqueeze(2).expand(2, 2, 9, 20),
        torch.randn(2, 2, 9, 33, generator=generator)[..., 7:27],
    ):
        hold(attention(*args, mask, backend="triton"), *args, mask)


def views(dtype):
    """Tensors as they lie in models: packed, transposed, sliced, expanded, oddly placed."""
    packed = torch.randn(2, 11, 3, 2, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    yield "packed", (q, k, v)
    yield "heads first", tuple(t.contiguous() for t in (q, k, v))
    yield "gaps in rows", tuple(t.repeat_interleave(2, -1)[..., ::2] for t in (q, k, v))
    yield "one batch for all", (q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))
    yield "single tokens", (q[:, :, :1], k[:, :, :1], v[:, :, :1])
    for offset in (1, 2, 4, 7):
        flat = torch.zeros(q.numel() + offset, dtype=dtype)
        placed = flat[offset:].view(q.shape).copy_(q)
        yield f"offset {offset}", (placed, k, v)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_triton_reads_tensors_where_they_lie(dtype):
    for name, args in views(dtype):
        got = attention(*args, backend="triton")
        expected = attention(*(t.clone(memory_format=torch.contiguous_format) for t in args),
                             backend="triton")  # fmt: skip
        assert torch.equal(got, expected), name


@interpreted
def test_the_output_lies_as_the_query_does():
    query, key, value = tensors(2, 4, 4, 6, 6, 8)
    assert attention(query, key, value, backend="triton").is_contiguous()
    got = attention(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)),
                    backend="triton")  # fmt: skip
    joined = got.transpose(1, 2).flatten(2)
    assert joined.data_ptr() == got.data_ptr()


@quiet
@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_a_query_that_sees_no_key_gives_zeros_as_pytorch_does(backend, kind):
    args = tensors(1, 2, 2, 5, 150, 16)
    mask = torch.ones(5, 150, dtype=torch.bool)
    mask[1] = mask[4] = False
    mask[2, :140] = False
    if kind == "-inf":
        mask = torch.zeros(5, 150).masked_fill(~mask, -math.inf)
    got = attention(*args, mask, backend=backend)
    assert got[:, :, [1, 4]].count_nonzero() == 0
    assert F.scaled_dot_product_attention(*args, mask)[:, :, [1, 4]].count_nonzero() == 0
    hold(got, *args, mask)


@quiet
@pytest.mark.parametrize("backend", ON_CPU)
def test_a_row_hidden_by_the_lowest_number_alone_is_the_mean(backend):
    query, key, value = tensors(1, 1, 1, 3, 150, 16)
    mask = torch.zeros(3, 150)
    mask[1] = LOWEST
    mask[2, 10:] = LOWEST
    got = attention(query, key, value, mask, backend=backend)
    torch.testing.assert_close(got[0, 0, 1], value[0, 0].mean(0))
    hold(got, query, key, value, mask)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("scale", [-0.5, 0.0, 30.0, 1e-3, 2])
def test_any_scale(backend, scale):
    args = tensors(1, 1, 1, 9, 150, 16)
    for causal in (False, True):
        got = attention(*args, scale=scale, causal=causal, backend=backend)
        hold(got, *args, scale=scale, causal=causal, eager=backend)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
def test_empty_tensors(backend, shape):
    batch, heads, queries, keys = shape
    args = [t.requires_grad_() for t in tensors(batch, heads, heads, queries, keys, 8)]
    got = attention(*args, backend=backend)
    assert got.shape == (batch, heads, queries, 8)
    assert got.count_nonzero() == 0
    got.sum().backward()
    assert all(t.grad.shape == t.shape for t in args)


@quiet
@interpreted
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_bad_query_stays_in_its_row(bad):
    query, key, value = tensors(1, 2, 2, 9, 20, 16)
    clean = attention(query, key, value, backend="triton")
    query[0, 1, 4] = bad
    got = attention(query, key, value, backend="triton")
    assert got[0, 1, 4].isnan().all()
    got[0, 1, 4] = clean[0, 1, 4]
    assert torch.equal(got, clean)


WRONG = [
    ({"query": torch.ones(2, 3, 8)}, ValueError, r"query has shape \[2, 3, 8\]"),
    ({"query": 3}, TypeError, "query is int"),
    ({"key": torch.ones(2, 2, 7, 8).half()}, TypeError, "key is torch.float16, query is"),
    ({"value": torch.ones(2, 2, 7, 8, dtype=torch.int64)}, TypeError, "value is torch.int64"),
    ({"key": torch.ones(2, 2, 7, 9)}, ValueError, "key has head_dim 9, query has 8"),
    ({"key": torch.ones(3, 2, 7, 8)}, ValueError, "key has batch 3, query has 2"),
    ({"value": torch.ones(2, 2, 6, 8)}, ValueError, "value has 2 heads of 6 tokens"),
    ({"query": torch.ones(2, 3, 5, 8)}, ValueError, "query has 3 heads, expected a multiple"),
    ({"query": torch.ones(2, 4, 5, 8, device="meta")}, ValueError, "key is on cpu, query is on"),
    ({"mask": torch.ones(5, 6)}, ValueError, r"mask has shape \[5, 6\], expected one that"),
    ({"mask": torch.ones(1, 2, 4, 5, 7)}, ValueError, "mask has shape"),
    ({"mask": torch.ones(5, 7, dtype=torch.int32)}, TypeError, "mask is torch.int32"),
    ({"mask": torch.ones(5, 7, device="meta")}, ValueError, "mask is on meta"),
    ({"mask": torch.ones(5, 7).double()}, TypeError, "mask is torch.float64"),
    ({"mask": torch.ones(5, 7).to_sparse()}, TypeError, "mask is torch.sparse_coo"),
    ({"scale": "large"}, TypeError, "scale is 'large'"),
    ({"scale": math.inf}, ValueError, "scale is inf"),
    ({"scale": math.nan}, ValueError, "scale is nan"),
    ({"causal": 2}, TypeError, "causal is 2"),
    ({"backend": "cuda"}, ValueError, "backend is 'cuda', expected one of"),
    ({"exact": "diffusers"}, ValueError, "exact is 'diffusers'"),
    *(({"backend": b}, ValueError, f"'{b}' cannot run this: tensors are on cpu")
      for b in ("cudnn", "flash", "efficient", "fa4")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "said"), WRONG, ids=[w[2] for w in WRONG])
def test_a_wrong_call_names_the_argument(change, error, said):
    arguments = dict(zip(("query", "key", "value"), tensors(2, 4, 2, 5, 7, 8), strict=True))
    attention(**arguments)
    for _ in range(2):  # nothing of the first failure is kept
        with pytest.raises(error, match=f"^attention: .*{said}"):
            attention(**arguments | change)
    attention(**arguments)


@interpreted
def test_triton_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="'triton' cannot run this: it holds head_dim up to 256"):
        attention(*tensors(1, 1, 1, 2, 2, 300), backend="triton")
    with pytest.raises(ValueError, match="'triton' cannot run this: float64"):
        attention(*tensors(1, 1, 1, 2, 2, 8, dtype=torch.float64), backend="triton")


def planned(query, key, value, mask=None, capability=(9, 0)):
    out = custom_kernels.allocate(query, key, value)
    values = {"query": query, "key": key, "value": value, "mask": mask, "out": out}
    values |= {"scale": None, "causal": False}
    target = Target(capability, 132)
    return launch.plan(Call(values, op="attention", exact=None, target=target)), values


def test_far_rows_and_many_blocks_are_addressed_or_refused():
    far = torch.empty(0, device="meta").as_strided((2, 2, 8, 16), (2**33, 2**32, 2**30, 1))
    plan, _ = planned(far, far, far)
    assert plan.scalars[5:8] == (2**30, 2**29, 2**27)
    assert plan.constants["UNIT"] == 8
    many = torch.empty(2**20, 2**12, 1, 16, device="meta")
    with pytest.raises(Unsupported, match="blocks of queries"):
        planned(many, many, many)


def test_tiles_fit_every_gpu():
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for dtype in (torch.float16, torch.float32):
            for dim in (16, 64, 72, 128, 200, 256):
                for queries in (1, 50, 5000):
                    for row_mask in (False, True):
                        tile = tiles.tile_for(capability, dtype, dim, queries, row_mask)
                        assert tile.rows >= 16
                        assert tile.keys >= 16
                        assert queries > 16 or tile.rows == 16


def test_flash_attn_4_is_called_as_it_wants_to_be(monkeypatch):
    """Its layout is [B, S, H, D], and it returns the logsumexp too."""
    seen = {}

    def flash_attn_func(q, k, v, *, softmax_scale, causal):
        seen.update(shape=q.shape, scale=softmax_scale, causal=causal)
        out = attention(*(t.transpose(1, 2) for t in (q, k, v)), None, softmax_scale, causal)
        return out.transpose(1, 2).contiguous(), None

    monkeypatch.setattr(custom_kernels, "_fa4", lambda: flash_attn_func)
    args = tensors(2, 4, 2, 6, 6, 8)
    for t in (args, [t.transpose(1, 2).contiguous().transpose(1, 2) for t in args]):
        got = custom_kernels.run(*t, None, 0.5, True, "fa4")
        assert torch.equal(got, attention(*args, scale=0.5, causal=True))
        assert got.stride() == custom_kernels.allocate(*t).stride()
    assert seen == {"shape": (2, 6, 4, 8), "scale": 0.5, "causal": True}


@pytest.mark.parametrize("backend", ON_CPU)
def test_it_compiles_to_one_graph_with_the_bits_of_eager(backend):
    torch._dynamo.reset()
    # auto and triton as a model of varying length compiles them, the others as one of fixed length
    dynamic = backend in ("auto", "triton")

    def run(query, key, value, mask):
        return attention(query, key, value, mask, causal=True, backend=backend)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    args = tensors(1, 4, 2, 20, 20, 32)
    for mask in (None, torch.rand(1, 1, 20, 20) > 0.2):
        assert torch.equal(compiled(*args, mask), run(*args, mask))


def test_a_graph_is_compiled_a_few_times_over_many_lengths():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    for length in range(3, 43):
        args = tensors(1, 1, 1, length, length, 8)
        assert torch.equal(compiled(*args), attention(*args))
    assert counter.frame_count <= 3


@interpreted
def test_the_graph_node_keeps_its_schema():
    query, key, value = (t.requires_grad_() for t in tensors(1, 2, 1, 5, 7, 16))
    node = torch.ops.kernelwright.attention_forward
    torch.library.opcheck(node, (query, key, value, None, None, True, "triton"))
    bias = torch.randn(5, 7, requires_grad=True)
    torch.library.opcheck(node, (query.transpose(1, 2).contiguous().transpose(1, 2), key, value,
                                 bias, 0.2, False, "triton"))  # fmt: skip


def gradients(backend, args, mask):
    """For one incoming gradient, whatever the output: those of query, key, value and a bias."""
    leaves = [t.detach().clone().requires_grad_() for t in args]
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().clone().requires_grad_()
        leaves.append(mask)
    out = attention(*leaves[:3], mask, causal=True, backend=backend)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    return [t.grad for t in leaves]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "bias"])
def test_gradients_of_triton_are_those_of_pytorch_bit_for_bit(kind, dtype):
    """Its backward is PyTorch's on the same inputs, and sees nothing of its forward."""
    args = tensors(1, 4, 2, 9, 9, 16, dtype=dtype)
    values = torch.randn(1, 1, 9, 9, generator=torch.Generator().manual_seed(0))
    mask = {"none": None, "bool": values > -0.5, "bias": values.to(dtype)}[kind]
    got, expected = (gradients(backend, args, mask) for backend in ("triton", "auto"))
    assert len(got) == (4 if kind == "bias" else 3)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_gradients_pass_gradcheck(causal):
    leaves = [t.requires_grad_() for t in tensors(1, 2, 1, 3, 4, 2, dtype=torch.float64)]
    bias = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *a: attention(*a, causal=causal), (*leaves, bias), raise_exception=True
    )
    assert torch.autograd.gradcheck(
        lambda *a: reference.attention(*a, None, causal), (*leaves, bias), raise_exception=True
    )


def test_autocast_casts_as_it_does_for_pytorch():
    query, key, value = tensors(1, 2, 2, 5, 7, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attention(query, key.bfloat16(), value)
        expected = F.scaled_dot_product_attention(query, key.bfloat16(), value)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)


def test_exact_is_pytorchs_own():
    for dtype in (*HALVES, torch.float32):
        args = tensors(1, 2, 2, 9, 20, 64, dtype=dtype)
        mask = torch.rand(9, 20) > 0.2
        expected = F.scaled_dot_product_attention(*args, mask)
        assert torch.equal(attention(*args, mask, exact="torch"), expected)

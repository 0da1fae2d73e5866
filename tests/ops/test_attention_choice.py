"""Which attention kernel a call gets: the measured table, and why a kernel refuses."""

import pytest
import torch

from kernelwright.ops.attention import choice, limits, sdpa
from kernelwright.ops.op import Choice

H200 = limits.Request(
    device=torch.device("cuda", 0),
    capability=(9, 0),
    dtype=torch.bfloat16,
    queries=2688,
    keys=2688,
    head_dim=64,
    value_dim=64,
    mask="none",
    mask_rows=False,
    causal=False,
    grad=False,
    mask_grad=False,
    aligned=True,
    deterministic=False,
    disabled=(),
)
LONG = {"queries": 32760, "keys": 32760}
WIDE = {"head_dim": 128, "value_dim": 128}
FEW = {"queries": 8064, "keys": 128}
CHOICES = [
    ({}, "cudnn"),
    ({"queries": 8064, "keys": 8064}, "fa4"),
    ({"queries": 4429, "keys": 4429}, "fa4"),
    (FEW, "triton"),
    (FEW | {"mask": "float"}, "triton"),
    (FEW | {"mask": "bool"}, "triton"),
    (FEW | {"mask": "other"}, "triton"),
    (FEW | {"mask": "float", "mask_rows": True}, "cudnn"),
    (FEW | {"mask": "float", "causal": True}, "cudnn"),
    (FEW | {"mask": "float", "keys": 129}, "cudnn"),
    (FEW | {"mask": "float", "grad": True}, "efficient"),
    (FEW | {"mask": "float", "mask_grad": True}, "efficient"),
    (FEW | {"mask": "float", "capability": (10, 0)}, "cudnn"),
    ({"queries": 4608, "keys": 4608} | WIDE, "cudnn"),
    (LONG | WIDE, "fa4"),
    (LONG | {"mask": "bool"}, "cudnn"),
    (LONG | {"grad": True}, "cudnn"),
    ({"queries": 5000, "causal": True} | {"keys": 6000}, "cudnn"),
    ({"mask": "float", "grad": True}, "efficient"),
    ({"mask": "float", "mask_grad": True}, "efficient"),
    ({"mask": "other"}, "triton"),
    ({"mask": "other", "grad": True}, "math"),
    ({"dtype": torch.float32}, "efficient"),
    ({"dtype": torch.float64}, "math"),
    ({"aligned": False}, "triton"),
    ({"head_dim": 13, "value_dim": 13}, "flash"),
    ({"head_dim": 13, "value_dim": 13, "mask": "bool"}, "triton"),
    ({"head_dim": 256, "value_dim": 256}, "cudnn"),
    ({"head_dim": 256, "value_dim": 256, "mask": "float"}, "cudnn"),
    ({"head_dim": 256, "value_dim": 256, "grad": True}, "flash"),
    ({"head_dim": 256, "value_dim": 256, "capability": (10, 0)}, "flash"),
    ({"head_dim": 512, "value_dim": 512}, "efficient"),
    ({"queries": 512, "keys": 1}, "flash"),
    ({"disabled": ("cudnn",)}, "flash"),
    ({"disabled": ("cudnn", "flash", "efficient")}, "triton"),
    ({"deterministic": True, "grad": True}, "flash"),
    ({"capability": (10, 0)} | LONG, "cudnn"),
    ({"capability": (8, 0)}, "flash"),
    ({"capability": (8, 0), "mask": "bool"}, "efficient"),
    ({"capability": (8, 0), "causal": True, "keys": 99}, "efficient"),
    ({"capability": (12, 0)}, "flash"),
    ({"capability": (7, 5), "dtype": torch.float16}, "efficient"),
]


@pytest.fixture
def everything_installed(monkeypatch):
    monkeypatch.setattr(limits, "fa4_installed", lambda: True)
    monkeypatch.setattr(limits, "triton_problem", lambda device, dtype: None)
    monkeypatch.setattr(limits, "cudnn_version", lambda: limits.CUDNN_WITH_256)


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize(("change", "expected"), CHOICES, ids=str)
def test_auto_takes_what_the_table_says(change, expected):
    chosen = choice.choose(H200._replace(**change))
    assert chosen.backend == expected, chosen.reason


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_few_keys_are_ours_where_that_was_measured(mask):
    few = H200._replace(**FEW, mask=mask)
    assert choice.choose(few).backend == "triton"
    assert choice.choose(few._replace(queries=choice.FEW_KEYS_QUERIES - 1)).backend == "cudnn"
    assert choice.choose(few._replace(aligned=False)).reason.startswith("takes any head_dim")


def test_a_request_says_whether_a_mask_differs_by_query():
    query, key = torch.empty(2, 4, 9, 8), torch.empty(2, 4, 5, 8)
    for shape, rows in (((5,), False), ((9, 1), True), ((2, 1, 1, 5), False), ((9, 5), True)):
        mask = torch.zeros(shape)
        assert choice.request_of(query, key, key, mask, False).mask_rows is rows
    repeated = torch.zeros(2, 1, 1, 5).expand(2, 4, 9, 5)
    assert not choice.request_of(query, key, key, repeated, False).mask_rows


def test_auto_without_flash_attn_4_stays_with_pytorch(monkeypatch):
    monkeypatch.setattr(limits, "fa4_installed", lambda: False)
    assert choice.choose(H200._replace(**LONG)).backend == "cudnn"
    with pytest.raises(ValueError, match="'fa4' cannot run this: flash-attn-4 is not installed"):
        choice.choose(H200, "fa4")


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        ("fa4", {"mask": "bool"}, "no mask"),
        ("fa4", {"causal": True, "keys": 99}, "aligns the causal mask"),
        ("fa4", {"head_dim": 200, "value_dim": 200, "capability": (10, 0)}, "up to 128"),
        ("flash", {"mask": "float"}, "no mask"),
        ("flash", {"causal": True, "keys": 99}, "aligns the causal mask"),
        ("flash", {"grad": True, "head_dim": 256, "value_dim": 256, "capability": (8, 6)}, "192"),
        ("cudnn", {"mask": "float", "mask_grad": True}, "no gradient for the mask"),
        ("cudnn", {"dtype": torch.float32}, "float16 and bfloat16"),
        ("cudnn", {"capability": (7, 5)}, "compute capability 8.0"),
        ("efficient", {"capability": (7, 5)}, "no bfloat16 below"),
        ("efficient", {"head_dim": 20}, "multiple of 8"),
        ("efficient", {"aligned": False}, "16 bytes"),
    ],
)
def test_a_named_kernel_runs_or_says_why_not(backend, change, reason):
    with pytest.raises(ValueError, match=f"^attention: backend '{backend}' .*{reason}"):
        choice.choose(H200._replace(**change), backend)
    assert choice.choose(H200, backend) == Choice(backend, "asked for by name")


def test_the_choice_for_a_device_is_told():
    assert choice.choose_for(torch.device("cpu"), torch.bfloat16).backend == "torch"


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "math"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_pytorchs_kernels_trace_whole_and_carry_gradients(name, masked):
    """On the meta device: shapes, gradients and graphs, without the GPU that runs them."""
    if name == "flash" and masked:
        pytest.skip("it takes no mask")
    torch._dynamo.reset()
    how = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    query, key = torch.empty(2, 8, 96, 72, **how), torch.empty(2, 2, 96, 72, **how)
    mask = torch.ones(2, 1, 1, 96, dtype=torch.bool, device="meta") if masked else None

    def run(query, key):
        return sdpa.KERNELS[name](query, key, key, mask, None, True)

    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        out = function(query, key)
        assert out.shape == query.shape
        grads = torch.autograd.grad(out.float().sum(), (query, key))
        assert [g.shape for g in grads] == [query.shape, key.shape]


def test_flash_attn_4_that_does_not_load_is_left_out_with_a_warning(monkeypatch):
    def import_module(name):
        raise ImportError("cannot import name '_cutlass_ir'")

    monkeypatch.setattr(limits.metadata, "version", lambda name: "4.0.0")
    monkeypatch.setattr(limits.importlib, "import_module", import_module)
    limits._fa4_installed.cache_clear()
    try:
        with pytest.warns(UserWarning, match="does not load: cannot import name '_cutlass_ir'"):
            assert not limits.fa4_installed()
        assert not limits.fa4_installed()  # said once
    finally:
        limits._fa4_installed.cache_clear()

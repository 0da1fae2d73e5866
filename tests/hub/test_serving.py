"""Kernels of the Hub that serve our ops: held to our reference first, refused with a reason."""

import json

import pytest
import torch
from typer.testing import CliRunner

import kernelwright as kw
from kernelwright import hub
from kernelwright.cli import app
from kernelwright.hub import serving
from kernelwright.ops.attention.limits import Request

ACTIVATION = "kernels-community/activation"
KERNEL = """
import torch
import torch.nn.functional as F

calls = []


def silu_and_mul(out, x):
    calls.append("silu")
    first, second = x.float().chunk(2, dim=-1)
    out.copy_(F.silu({activated}) * {other})


def gelu_tanh_and_mul(out, x):
    calls.append("gelu")
    first, second = x.float().chunk(2, dim=-1)
    out.copy_(F.gelu(first, approximate="tanh") * second)
"""


@pytest.fixture(autouse=True)
def own_kernels_again():
    yield
    hub.release()


def activation(folder, monkeypatch, name, activated="first", other="second"):
    """A kernel as kernels-community/activation has it, taken through LOCAL_KERNELS."""
    variant = folder / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    metadata = {
        "name": "activation",
        "id": name,
        "version": 1,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata))
    (variant / "__init__.py").write_text(KERNEL.format(activated=activated, other=other))
    monkeypatch.setenv("LOCAL_KERNELS", f"{ACTIVATION}={folder}")


def test_a_kernel_that_computes_the_same_serves_the_op(tmp_path, monkeypatch):
    activation(tmp_path, monkeypatch, "_activation_right")
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    before = kw.swiglu(x)
    used = hub.use(ACTIVATION, version=1, device="cpu")
    assert used.serves == ("swiglu", "geglu")
    import sys

    calls = sys.modules["_activation_right"].calls
    calls.clear()
    assert torch.equal(kw.swiglu(x), before)
    assert torch.equal(kw.swiglu(x, backend="hub"), before)
    assert torch.equal(torch.compile(kw.swiglu, backend="eager", fullgraph=True)(x), before)
    out = torch.empty_like(before)
    assert kw.swiglu(x, out=out) is out
    assert torch.equal(out, before)
    assert calls == ["silu"] * 4


def test_what_it_cannot_take_the_op_runs_itself(tmp_path, monkeypatch):
    activation(tmp_path, monkeypatch, "_activation_partly")
    hub.use(ACTIVATION, version=1, device="cpu")
    import sys

    calls = sys.modules["_activation_partly"].calls
    calls.clear()
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    kw.swiglu(x, gate="second")
    kw.swiglu(x.float())
    kw.swiglu(x, exact="torch")
    kw.swiglu(x, backend="torch")
    kw.geglu(x, approximate=False, gate="first")
    assert not calls
    with pytest.raises(ValueError, match="it activates the first half"):
        kw.swiglu(x, gate="second", backend="hub")


def test_a_kernel_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    activation(tmp_path, monkeypatch, "_activation_wrong", activated="second", other="first")
    used = hub.use(ACTIVATION, version=1, device="cpu")
    assert used.serves == ("geglu",)
    assert "further from float64 than eager PyTorch" in used.refused["swiglu"]
    with pytest.raises(ValueError, match="no kernel from the Hub serves this op"):
        kw.swiglu(torch.ones(1, 2), backend="hub")


def test_release_gives_an_op_its_own_kernels_back(tmp_path, monkeypatch):
    activation(tmp_path, monkeypatch, "_activation_released")
    hub.use(ACTIVATION, version=1, device="cpu")
    hub.release("swiglu")
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    kw.geglu(x, gate="first", backend="hub")
    with pytest.raises(ValueError, match="backend 'hub' cannot run this"):
        kw.swiglu(x, backend="hub")


def test_offline_it_says_so_and_the_op_keeps_its_own(monkeypatch):
    import kernels

    def unreachable(*args, **kwargs):
        raise ValueError("could not verify the publisher") from ConnectionError("no route")

    monkeypatch.setattr(kernels, "has_kernel", unreachable)
    run = CliRunner().invoke(app, ["hub", "use", f"{ACTIVATION}@v1", "--json"])
    assert run.exit_code == 1
    # the progress bar is on stderr
    (used,) = json.loads(run.stdout)
    assert used["serves"] == []
    assert used["refused"]["swiglu"] == "offline: the Hub cannot be reached; the op keeps its own"
    assert torch.equal(kw.swiglu(torch.zeros(1, 2)), torch.zeros(1, 1))


def test_a_kernel_without_a_build_for_this_machine_is_not_downloaded(monkeypatch):
    import kernels

    asked = []
    monkeypatch.setattr(kernels, "has_kernel", lambda *a, **how: asked.append(how))
    monkeypatch.setattr(kernels, "get_kernel", None)
    used = hub.use(ACTIVATION, version=1, device="cpu")
    assert f"no build for torch {torch.__version__}" in used.refused["swiglu"]
    CliRunner().invoke(app, ["hub", "use", f"{ACTIVATION}@v1", "--trust-remote-code"])
    assert [how["trust_remote_code"] for how in asked] == [False, True]


@pytest.mark.parametrize(
    ("named", "says"),
    [("nobody/nothing@v1", "there are adapters for"), (ACTIVATION, "name its version")],
)
def test_a_kernel_that_cannot_be_named_so_is_one_line(named, says):
    run = CliRunner().invoke(app, ["hub", "use", named])
    assert run.exit_code == 1
    assert says in run.stderr


class Flash:
    """Flash attention as the Hub has it: tokens before heads, (out, logsumexp) back."""

    @staticmethod
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=softmax_scale, is_causal=causal
        )
        return out.transpose(1, 2), None


def test_attention_is_served_and_has_its_gradients(monkeypatch):
    (adapter,) = serving.ADAPTERS["kernels-community/flash-attn3"]

    def problem(request: Request) -> str | None:
        on_gpu = request._replace(device=torch.device("cuda"))
        return adapter.problem(on_gpu)

    here = serving.Adapter(adapter.op, adapter.function, adapter.call, problem)
    assert serving.serve(here, Flash, "flash", "cpu") is None
    q, k, v = torch.randn(3, 1, 2, 4, 8, dtype=torch.bfloat16)
    want = kw.attention(q, k, v, backend="torch")
    got = kw.attention(q, k, v, backend="hub")
    torch.testing.assert_close(got, want)
    assert torch.equal(kw.attention(q, k, v), got)
    with pytest.raises(ValueError, match="it takes no mask"):
        kw.attention(q, k, v, torch.ones(4, 4, dtype=torch.bool), backend="hub")
    q.requires_grad_()
    kw.attention(q, k, v, backend="hub").float().sum().backward()
    assert q.grad is not None
    hub.release("attention")
    with pytest.raises(ValueError, match="no kernel from the Hub serves attention"):
        kw.attention(q, k, v, backend="hub")

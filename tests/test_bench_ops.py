"""`kernelwright bench ops`: every column, the checks before a time, and errors for bad input."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from declared import ALL, every_op
from typer.testing import CliRunner

from kernelwright.backends import Unsupported
from kernelwright.bench import peers
from kernelwright.bench.case_selection import choose_cases, known_presets
from kernelwright.bench.correctness import Truth, Wrong, ran_a_kernel, same_bits
from kernelwright.bench.peers import Peer, Way
from kernelwright.cli import app
from kernelwright.measure.cpu_caveat import CAVEAT
from kernelwright.ops.attention import reference
from kernelwright.ops.case import Inputs
from kernelwright.ops.op import registry
from kernelwright.ops.plan import eager_plan
from kernelwright.report import read

RMSNORM = registry()["rmsnorm"]
QUICK = ["--device", "cpu", "--seconds", "0"]


def invoke(*args):
    return CliRunner().invoke(app, ["bench", "ops", *args], env={"COLUMNS": "200"})


def rows_of(result, code=0):
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_a_row_has_every_figure_and_the_file_is_read_by_the_report(tmp_path):
    out = tmp_path / "new" / "ops.json"
    how = ["--dtype", "float32,float16", "--shape", "2x2x64", "--json", "--out", str(out)]
    rows = rows_of(invoke("rmsnorm", *QUICK, *how))
    assert [row["dtype"] for row in rows] == ["float32", "float16"]
    for row in rows:
        times = row["wall_us"]
        # 4 rows of 64 in and out, and a weight
        bytes_moved = (2 * 4 * 64 + 64) * (4 if row["dtype"] == "float32" else 2)
        assert row["megabytes"] == bytes_moved / 1e6
        assert set(times) == {"torch", "triton", "eager"} == set(row["error"])
        assert row["chosen"] == "torch"
        assert row["gb_s"]["triton"] == pytest.approx(bytes_moved / times["triton"] / 1e3)
        assert row["of_copy"]["torch"] == pytest.approx(row["copy_us"] / times["torch"])
        assert row["over"] == {"eager": pytest.approx(times["eager"] / times["torch"])}
        rounding = torch.finfo(getattr(torch, row["dtype"])).eps / 2
        assert 0 < row["error"]["triton"] <= row["eager_error"] + rounding
        assert not row["failed"]
        assert not row["gpu_us"]
    written = json.loads(out.read_text())
    assert written["rows"] == rows
    assert (written["schema"], written["kind"]) == (1, "ops")
    assert written["peers"] == {"torch": torch.__version__}
    environment = {"gpu", "driver", "torch", "triton", "commit", "command"}
    assert environment <= written["environment"].keys()
    assert written["environment"]["gpu"] is None
    (file,) = read([out])
    assert [op.dtype for op in file.ops] == ["float32", "float16"]


def test_the_table_has_the_columns_and_says_what_a_cpu_cannot_show():
    result = invoke("silu_mul", *QUICK)
    assert result.exit_code == 0, result.output
    for head in ("wall µs", "GB/s", "of copy", "eager", "error", "eager's"):
        assert head in result.output
    assert CAVEAT in " ".join(result.output.split())


def planned(monkeypatch, plan):
    """Make rmsnorm launch what `plan` returns, at a shape that no other test has planned."""
    monkeypatch.setattr(RMSNORM, "launch_plan", lambda args, out, how, alignment=16: plan(how))
    monkeypatch.setattr(RMSNORM, "_plans", {})


def test_a_wrong_kernel_has_no_time_and_fails_the_run(monkeypatch):
    planned(monkeypatch, lambda how: lambda a, out: 1.01 * F.rms_norm(a[0], (32,), *a[1:]))
    result = invoke("rmsnorm", *QUICK, "--shape", "5x32", "--json")
    (row,) = rows_of(result, code=1)
    assert "against float64" in row["failed"]["triton"]
    assert set(row["wall_us"]) == {"torch", "eager"}
    assert "triton" not in row["gb_s"]


def breaks(how):
    def plan(args, out):
        raise RuntimeError("illegal memory access")

    return plan


def test_a_kernel_that_breaks_fails_the_run(monkeypatch):
    planned(monkeypatch, breaks)
    (row,) = rows_of(invoke("rmsnorm", *QUICK, "--shape", "5x32", "--json"), code=1)
    assert row["failed"] == {"triton": "RuntimeError: illegal memory access"}


def test_a_kernel_that_does_not_do_this_says_so_and_fails_nothing(monkeypatch):
    def cannot(call):
        raise Unsupported("no rows of 32")

    monkeypatch.setattr(RMSNORM, "kernels", SimpleNamespace(triton=cannot))
    monkeypatch.setattr(RMSNORM, "_plans", {})
    (row,) = rows_of(invoke("rmsnorm", *QUICK, "--shape", "5x32", "--json"))
    assert "no rows of 32" in row["not_covered"]["triton"]
    assert set(row["wall_us"]) == {"torch", "eager"}


def test_a_silent_fallback_fails_the_run(monkeypatch):
    planned(monkeypatch, lambda how: eager_plan(RMSNORM, how))
    result = invoke("rmsnorm", *QUICK, "--shape", "5x32")
    assert result.exit_code == 1
    assert "rmsnorm shape 5x32 float32, triton: fell back to PyTorch" in result.output


@every_op([op for op in ALL if {"triton", "cuda"} <= set(op.backends)])
def test_arithmetic_of_pytorch_is_told_from_a_launch(op):
    arguments = op.cases[0].arguments(Inputs(torch.float32))
    op.call(arguments, backend="triton")
    ran_a_kernel(lambda: op.call(arguments, backend="triton"))
    with pytest.raises(Wrong, match="fell back"):
        ran_a_kernel(lambda: op.call(arguments, backend="torch"))


def test_the_bar_is_eager_and_one_rounding():
    arguments = RMSNORM.cases[0].arguments(Inputs(torch.bfloat16))
    right = F.rms_norm(arguments["input"], (64,), arguments["weight"], 1e-6)
    truth = Truth(RMSNORM, arguments, right)
    assert truth.hold(right) == truth.eager_error
    # bfloat16 has 8 bits: 1/256 is half an ulp, the rounding that is allowed; 1/64 is not
    with pytest.raises(Wrong, match="error"):
        truth.hold(right * (1 + 1 / 64))
    with pytest.raises(Wrong, match="error inf"):
        truth.hold(right * float("nan"))
    with pytest.raises(Wrong, match="shape"):
        truth.hold(right[:1])
    with pytest.raises(Wrong, match="eager itself"):
        Truth(RMSNORM, arguments, right * 1.05)


def test_an_exact_mode_must_have_the_bits():
    x = torch.arange(8.0)
    same_bits((x, x), (x.clone(), x.clone()), "torch")
    with pytest.raises(Wrong, match="1 elements"):
        same_bits(x, x + torch.tensor([0.0] * 7 + [1e-6]), "torch")


def test_a_part_of_a_large_attention_stands_for_the_whole(monkeypatch):
    op = registry()["attention"]
    case = next(c for c in op.cases if c.name == "padding")
    arguments = case.arguments(Inputs(torch.float32))
    eager = peers.eager(op)(**arguments)
    whole = Truth(op, arguments, eager)
    monkeypatch.setattr(reference, "MAX_SCORES", 10)
    part = Truth(op, arguments, eager)
    assert 0 < part.error(eager) < 2 * whole.error(eager)
    with pytest.raises(Wrong, match="error"):
        part.hold(1.001 * eager)


def test_a_peer_that_is_missing_gets_a_line_that_says_how_to_have_it(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    result = invoke("silu_mul", *QUICK, "--peers", "torch,liger")
    assert result.exit_code == 0
    assert "liger is not installed: pip install 'liger-kernel==0.8.5'" in result.output
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    assert "quack needs a CUDA GPU" in invoke("silu_mul", *QUICK, "--peers", "quack").output


@pytest.mark.parametrize(
    ("computed", "why"),
    [(lambda a: F.silu(a["gate"]), "against float64"), (lambda a: a["nothing"], "KeyError")],
    ids=["wrong", "refuses"],
)
def test_a_peer_that_is_wrong_or_refuses_has_no_time(monkeypatch, computed, why):
    peer = Peer("liger", "liger", lambda op, a: Way(computed, dict))
    monkeypatch.setitem(peers.PEERS, "liger", peer)
    (row,) = rows_of(invoke("silu_mul", *QUICK, "--peers", "torch,liger", "--json"))
    assert why in row["not_covered"]["liger"]
    assert not row["failed"]
    assert "liger" not in row["wall_us"]
    assert set(row["over"]) == {"eager"}


def test_presets_have_the_shapes_of_their_models():
    seed = choose_cases([], ["seed"], [], small=False)
    shapes = [
        tuple(case.arguments(Inputs(torch.float16, "meta"))["input"].shape) for _, case in seed
    ]
    assert {op.name for op, _ in seed} == {"rmsnorm"}
    assert shapes == [
        (1, 1024, 2048),
        (2, 1024, 2048),
        (4, 1024, 2048),
        (2, 4096, 3072),
        (4, 4096, 3072),
    ]
    assert {"seed", "ltx", "flux", "wan", "llama"} <= set(known_presets())
    both = choose_cases([], ["wan", "llama"], [], small=False)
    assert {case.preset for _, case in both} == {"wan", "llama"}
    names = {op.name for op, _ in both}
    assert {"adaln_layernorm", "gated_residual_norm", "silu_mul", "apply_rope_qk"} <= names
    assert "geglu" not in names


def test_without_a_preset_all_shapes_of_models_are_taken_or_small_ones():
    (op, case), *others = choose_cases(["rmsnorm"], [], [], small=False)
    assert op is RMSNORM
    assert case.large
    assert all(case.large for _, case in others)
    small = choose_cases([], [], [], small=True)
    assert {op.name for op, _ in small} == set(registry())
    assert not any(case.large for _, case in small)


def test_an_op_that_is_in_no_model_is_taken_at_a_small_shape(monkeypatch):
    monkeypatch.setattr(RMSNORM, "cases", [c for c in RMSNORM.cases if not c.large])
    assert choose_cases(["rmsnorm"], [], [], small=False) == [(RMSNORM, RMSNORM.cases[0])]
    assert "rmsnorm" not in {op.name for op, _ in choose_cases([], [], [], small=False)}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["rmsnorn"], "rmsnorm"),
        (["--preset", "lxt"], "ltx"),
        (["geglu", "--preset", "wan"], "in flux, ltx, sdxl"),
        (["rmsnorm", "--shape", "2,64"], "2x1024x2048"),
        (["rmsnorm", "--shape", "0x64"], "2x1024x2048"),
        (["apply_rope", "--shape", "4x63"], "63"),
        (["attention", "--shape", "4x64"], "--preset"),
        (["--dtype", "int8"], "bfloat16"),
        (["--peers", "lieger"], "liger"),
        (["--device", "tpu"], "tpu"),
        (["--out", "/proc/nothing/here.json"], "cannot be written"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_input_gets_one_clear_line(args, said):
    result = invoke(*QUICK, *args)
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_peers_get_the_arguments_that_they_take():
    inputs = Inputs(torch.float32)
    swiglu = registry()["swiglu"].cases[1].arguments(inputs)
    gate, up = peers.LIGER["swiglu"][1](swiglu)
    assert gate.is_contiguous()
    assert torch.equal(F.silu(gate) * up, peers.eager(registry()["swiglu"])(**swiglu))
    erf = next(c for c in registry()["geglu"].cases if c.name == "erf").arguments(inputs)
    assert peers.LIGER["geglu"][1](erf) is None
    rope = {c.name: c.arguments(inputs) for c in registry()["apply_rope_qk"].cases if not c.large}
    assert peers.LIGER["apply_rope_qk"][1](rope["flux"]) is None
    grouped = rope["grouped query"]
    # as in a model: tokens before heads in memory
    grouped["query"] = grouped["query"].transpose(1, 2).contiguous().transpose(1, 2)
    query, _, _, _ = peers.LIGER["apply_rope_qk"][1](grouped)
    assert torch.equal(query, grouped["query"])
    query.zero_()  # Liger rotates in place: it needs its own copy of the arguments
    assert grouped["query"].any()
    flux = next(c for c in registry()["apply_rope"].cases if c.name == "flux").arguments(inputs)
    _, cos, _, interleaved = peers._turned_by_quack(flux)
    assert torch.equal(cos.repeat_interleave(2, -1), flux["cos"])
    assert interleaved

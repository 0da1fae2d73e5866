"""`kernelwright check`: good is what holds every promise, and a broken kernel is not."""

import json

import pytest
import torch
from plugged import change, plugged
from typer.testing import CliRunner

from kernelwright.backends import HOPPER
from kernelwright.cli import app
from kernelwright.ops.case import Inputs
from kernelwright.ops.op import registry
from kernelwright.ops.plan import Call
from kernelwright.scaffold import create

NO_GPU = not torch.cuda.is_available()


def invoke(*args):
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "300"})


def check(name, *options):
    result = invoke("check", name, "--json", *options)
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.stdout)
    assert report["good"] == (result.exit_code == 0)
    return report, {part["name"]: part for part in report["parts"]}


@pytest.mark.skipif(not NO_GPU, reason="a GPU is here: tests/gpu/test_scaffold.py")
def test_a_new_kernel_is_good_and_what_could_not_be_seen_is_said(tmp_path):
    created = create("check_new", "triton", "elementwise", tmp_path / "op")
    with plugged(created):
        report, parts = check("check_new", "--target", "sm_90")
    assert report["verdict"] == "good so far; not run: gpu, benchmark"
    assert parts["tests"]["summary"].endswith("hold, triton interpreted")
    assert "no GPU here" in parts["gpu"]["skipped"]
    assert {row["arch"] for row in parts["cubins"]["rows"]} == {"sm_90"}
    assert all(row["used"]["registers"] > 0 for row in parts["cubins"]["rows"])


# a change to the Triton kernel, and what a test then says
BROKEN = {
    "wrong formula": ("tl.sigmoid(beta * b_x)", "tl.sigmoid(b_x)", "over the bar"),
    "unwritten column": ("& (o_n < N)", "& (o_n < N - 1)", "NaN in other places"),
    "does not run": ("b_x = tl.load(", "b_x = tl.lode(", "lode"),
}


@pytest.mark.skipif(not NO_GPU, reason="kernels are interpreted where there is no GPU")
@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_triton_kernel_is_not_good(how, tmp_path):
    old, new, says = BROKEN[how]
    name = f"check_{how.replace(' ', '_')}"
    created = create(name, "triton", "elementwise", tmp_path / "op")
    change(created.kernel, old, new)
    with plugged(created):
        report, parts = check(name, "--only", "tests")
    assert report["verdict"].startswith("not good")
    assert any(f.startswith("triton: ") and says in f for f in parts["tests"]["failures"])
    assert not any(f.startswith("torch: ") for f in parts["tests"]["failures"])


def test_a_wrong_chain_example_or_error_is_not_good(tmp_path):
    created = create("check_reference", "cuda", "gated", tmp_path / "op")
    folder = created.root / "src" / "check_reference"
    change(folder / "reference.py", "return torch.sigmoid(gate) * up", "return gate * up")
    change(folder / "__init__.py", "1.4621", "1.4622")
    change(folder / "__init__.py", 'checks.like("check_reference", "up"', 'checks.like("op", "up"')
    with plugged(created):
        _, parts = check("check_reference", "--only", "tests")
    failures = parts["tests"]["failures"]
    for what in (
        "eager torch, rows: ",
        "the example in its documentation runs: ",
        "a wrong tensor",
    ):
        assert any(f.startswith(what) for f in failures), what


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("check_error", "y.fill(", "y.put(", '"put"'),
        # an array that is indexed by what only the GPU knows lies on the stack
        (
            "check_spill",
            "    return Round::mul(",
            "    float kept[64];\n    for (int j = 0; j < 64; j++) kept[j] = j * args.beta;\n"
            "    return kept[__float_as_int(x.get(i)) & 63] + Round::mul(",
            "stack 256",
        ),
    ],
)
def test_a_cuda_kernel_that_does_not_compile_or_spills_is_not_good(name, old, new, says, tmp_path):
    pytest.importorskip("cuda.core")
    created = create(name, "cuda", "elementwise", tmp_path / "op")
    change(created.kernel, old, new)
    with plugged(created):
        result = invoke("check", name, "--only", "cubins", "--target", "sm_90")
    assert result.exit_code == 1
    assert says in result.output
    assert "not good: " in result.output


def test_a_changed_header_is_another_kernel(tmp_path):
    created = create("check_header", "cuda", "elementwise", tmp_path / "op")
    with plugged(created):
        op = registry()["check_header"]
        values = {"input": Inputs(torch.float32, "meta").normal(4, 64), "beta": 1.0}
        values["out"] = values["input"]
        call = Call(values, op=op.name, exact=None, target=HOPPER)
        before = op.kernels.cuda(call).code
        assert op.kernels.cuda(call).code == before
        change(created.kernel, "Round::mul(x.get(i), sigmoid)", "Round::mul(sigmoid, x.get(i))")
        assert op.kernels.cuda(call).code != before


def test_an_op_of_another_package_is_listed_and_timed_like_ours(tmp_path):
    created = create("check_listed", "triton", "gated", tmp_path / "op")
    with plugged(created):
        listed = json.loads(invoke("ops", "check_listed", "--json").stdout)
        assert listed["backends"] == ["torch", "triton"]
        assert listed["signature"].startswith("check_listed(gate, up, out=None")
        timed = invoke("bench", "ops", "check_listed", "--json")
        assert timed.exit_code == 0, timed.output
        assert [row["op"] for row in json.loads(timed.stdout)] == ["check_listed"]
    assert "check_listed" not in registry()


def test_a_package_that_cannot_be_imported_leaves_the_other_ops(tmp_path):
    created = create("check_import", "triton", "gated", tmp_path / "op")
    change(created.root / "src/check_import/cases.py", "CASES = [", "CASES = [nothing,")
    with plugged(created), pytest.warns(UserWarning, match="'check_import' are left out.*nothing"):
        known = registry()
    assert "rmsnorm" in known
    assert "check_import" not in known


def test_an_op_runs_on_the_backends_it_declares(tmp_path):
    created = create("check_backends", "triton", "elementwise", tmp_path / "op")
    x = torch.randn(3, 8)
    with plugged(created):
        op = registry()["check_backends"]
        with pytest.raises(
            ValueError, match=r"^check_backends: backend 'cuda': this op has torch, "
        ):
            op(x, 1.0, backend="cuda")
        # on a GPU too, where exact modes are the cuda backend's
        choice = op.choose_for(torch.device("cuda", 0), torch.float32, "torch")
        assert choice.backend == "torch"
        assert torch.equal(op(x, 1.0, exact="torch"), x * torch.sigmoid(x * 1.0))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["rmsnrom"], "did you mean rmsnorm"),
        (["rmsnorm", "--only", "speed"], "expected any of tests, cubins, gpu, benchmark"),
        (["rmsnorm", "--target", "sm_42"], "sm_120"),
    ],
)
def test_what_there_is_not_is_named(args, says):
    result = invoke("check", *args)
    assert result.exit_code == 2
    assert says in result.output

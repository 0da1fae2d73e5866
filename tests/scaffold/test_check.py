"""`kernelwright check`: good is what holds every promise, and a broken kernel is not."""

import json

import pytest
import torch
from everything import share
from plugged import change, plugged
from typer.testing import CliRunner

import kernelwright
from kernelwright.backends import HOPPER
from kernelwright.checking import emulator, promises
from kernelwright.checking.cubins import cubins
from kernelwright.checking.promises import Promise, close_emulated, gradient
from kernelwright.cli import app
from kernelwright.errors import CannotRun
from kernelwright.ops.case import Case, Inputs
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


@pytest.fixture
def without_tracing(monkeypatch):
    """For kernels that are wrong: torch.compile takes most of the time of a check, and says nothing
    of numbers."""
    for promise in ("compiled", "library_op"):
        monkeypatch.setattr(promises, promise, lambda op, device: None)


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


@pytest.mark.skipif(not NO_GPU, reason="a GPU is here")
def test_parts_that_cannot_run_here_are_no_check():
    report, _ = check("rmsnorm", "--only", "gpu", "--only", "benchmark")
    assert not report["good"]
    assert report["verdict"] == "nothing was run"


# a change to the Triton kernel, and what a test then says
BROKEN = {
    "wrong formula": ("tl.sigmoid(beta * b_x)", "tl.sigmoid(b_x)", "over the bar"),
    "unwritten column": ("& (o_n < N)", "& (o_n < N - 1)", "NaN in other places"),
    "does not run": ("b_x = tl.load(", "b_x = tl.lode(", "lode"),
}


@pytest.mark.usefixtures("without_tracing")
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


@pytest.mark.usefixtures("without_tracing")
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
        # more values at once than a thread has registers
        (
            "check_spill",
            "  y.fill([&](int i) {",
            "  float kept[300], sum = 0.f;\n"
            "  const volatile float* all = (const float*)args.x + threadIdx.x;\n"
            "#pragma unroll\n"
            "  for (int j = 0; j < 300; j++) sum = sum * args.beta + (kept[j] = all[j]);\n"
            "#pragma unroll\n"
            "  for (int j = 299; j >= 0; j--) sum = sum * args.beta + kept[j];\n"
            "  y.fill([&](int i) {\n    if (sum == 7.f) return sum;",
            "spills ",
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


def test_a_missing_nvrtc_is_named(monkeypatch):
    def missing(*args, **how):
        raise RuntimeError("kernelwright: NVRTC could not compile for sm_90\nno libnvrtc.so.13")

    monkeypatch.setattr("kernelwright.backends.cuda.build", missing)
    with pytest.raises(CannotRun, match="for sm_90; no libnvrtc"):
        cubins(registry()["rmsnorm"], "cuda", ("sm_90",))


def test_a_gradient_at_a_kink_says_what_to_do():
    def kink(inputs):
        return {"gate": torch.tensor([0.0, 1.0]), "up": torch.ones(2)}

    class Relu:
        def call(self, arguments):
            return torch.relu(arguments["gate"]) * arguments["up"]

    with pytest.raises(AssertionError, match="draw the values of the case elsewhere"):
        gradient(Relu(), Case("kink", kink), "cpu")


def test_stack_without_a_spill_is_no_failure(tmp_path):
    """An array that is indexed by what only the GPU knows lies on the stack."""
    pytest.importorskip("cuda.core")
    created = create("check_stack", "cuda", "elementwise", tmp_path / "op")
    array = "    float kept[64];\n    for (int j = 0; j < 64; j++) kept[j] = j * args.beta;\n"
    change(
        created.kernel,
        "    return Round::mul(",
        f"{array}    return kept[__float_as_int(x.get(i)) & 63] + Round::mul(",
    )
    with plugged(created):
        report, parts = check("check_stack", "--only", "cubins", "--target", "sm_90")
    assert report["good"]
    assert "256 bytes of stack without a spill: no failure" in parts["cubins"]["summary"]


def test_all_cases_compiles_more_than_the_largest(tmp_path):
    pytest.importorskip("cuda.core")
    created = create("check_cases", "cuda", "elementwise", tmp_path / "op")
    with plugged(created):
        _, largest = check("check_cases", "--only", "cubins", "--target", "sm_90")
        _, every = check("check_cases", "--only", "cubins", "--target", "sm_90", "--all-cases")
    assert "of the largest of 14 cases (--all-cases)" in largest["cubins"]["summary"]
    assert "of all cases" in every["cubins"]["summary"]
    assert len(every["cubins"]["rows"]) > 2 * len(largest["cubins"]["rows"])


def test_cases_that_share_a_triton_kernel_are_compiled_once(tmp_path):
    pytest.importorskip("triton")
    created = create("check_shared", "triton", "gated", tmp_path / "op")
    with plugged(created):
        report, parts = check(
            "check_shared", "--only", "cubins", "--target", "sm_75", "--all-cases"
        )
    assert report["good"], parts
    found = [row["kernel"] for row in parts["cubins"]["rows"]]
    assert any("[storage offset]" in name and "2-byte" in name for name in found)
    assert not any("bfloat16" in name for name in found)  # Triton has none there
    assert len(found) == len(set(found)) > 6


# a change of a row reduction, which has no exact mode, and where its second rounding shows
TWICE = {
    "reference": ("affine(x, weight)", "x.to(input.dtype) * weight", "reference.py", "torch: rows"),
    "kernel": (
        "const float v = held[k].get(i) * scale;",
        "const float v = widen(narrow<X>(held[k].get(i) * scale));",
        "cuda.cuh",
        "cuda emulated: rows",
    ),
}


@pytest.mark.usefixtures("without_tracing")
@pytest.mark.skipif(not NO_GPU or emulator.problem() is not None, reason="a GPU, or no g++")
@pytest.mark.parametrize("where", share(TWICE, 2))
def test_a_second_rounding_is_not_good_without_an_exact_mode(where, tmp_path):
    old, new, file, named = TWICE[where]
    name = f"check_twice_{where}"
    created = create(name, "cuda", "row-reduction", tmp_path / "op")
    change(created.kernel.with_name(file), old, new)
    with plugged(created):
        _, parts = check(name, "--only", "tests")
    failures = [f for f in parts["tests"]["failures"] if f.startswith(named)]
    assert failures
    assert all("computes in float32 and rounds once" in f for f in failures)


@pytest.mark.usefixtures("without_tracing")
def test_a_formula_that_is_not_the_derivative_is_named(tmp_path):
    created = create("check_formula", "triton", "gated", tmp_path / "op", backward=True)
    change(created.kernel.with_name("backward.py"), "s * (1 - s)", "s * (2 - s)")
    with plugged(created):
        _, parts = check("check_formula", "--only", "tests", "--backend", "torch")
    failures = [f for f in parts["tests"]["failures"] if "is the derivative" in f]
    assert failures
    assert all("backward.py: `formula` is not the derivative" in f for f in failures)
    assert all("gradient of gate" in f for f in failures)


def test_the_reference_is_checked_before_there_is_a_kernel(tmp_path):
    created = create("check_torch", "triton", "elementwise", tmp_path / "op")
    created.kernel.write_text("raise RuntimeError('not written yet')\n")
    with plugged(created):
        report, parts = check("check_torch", "--backend", "torch", "--only", "tests,cubins")
        assert invoke("check", "check_torch", "--only", "tests").exit_code == 1
    assert report["good"], parts
    assert parts["tests"]["summary"].endswith("plain PyTorch alone: no kernel runs here")
    assert parts["cubins"]["skipped"]


# a change to a CUDA package, and what a test then says without a GPU
BROKEN_CUDA = {
    "wrong formula": ("cuda.cuh", "Round::mul(x.get(i), args.beta)", "x.get(i)", "over the bar"),
    "wrong grid": ("cuda.py", "block=BLOCK", "block=BLOCK // 4", "NaN in other"),
    "swapped pointers": (
        "cuda.py", 'pointers=("input", "out")', 'pointers=("out", "input")', "NaN in other",
    ),
    "another layout": ("cuda.py", 'layout="6q3If"', 'layout="6q3Iff"', "packs 88 bytes"),
    "too much": ("cuda.cuh", "if (row >= args.rows.count) return;", "", "wrote outside of out"),
}  # fmt: skip


@pytest.mark.skipif(not NO_GPU, reason="CUDA C++ is emulated where there is no GPU")
@pytest.mark.skipif(emulator.problem() is not None, reason="no g++")
@pytest.mark.parametrize("how", BROKEN_CUDA)
def test_a_broken_cuda_kernel_is_not_good_without_a_gpu(how, tmp_path):
    file, old, new, says = BROKEN_CUDA[how]
    name = f"check_cuda_{how.replace(' ', '_')}"
    created = create(name, "cuda", "elementwise", tmp_path / "op")
    change(created.root / "src" / name / file, old, new)
    if how == "another layout":
        change(created.root / "src" / name / file, 'call["beta"])', 'call["beta"], 0.0)')
    with plugged(created):
        op = registry()[name]
        chosen = [c for c in op.cases if c.name in ("odd width", "transposed")]
        calls = [(c.arguments(Inputs(torch.float32)), None) for c in chosen]
        built = emulator.compiled(op, calls)
        broken = [
            Promise(c.name, lambda c=c: close_emulated(op, c, torch.float32, None, built)).broken()
            for c in chosen
        ]
    assert all(broken), broken
    assert any(says in why for why in broken), broken


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
        one = torch.ones(2)
        assert torch.equal(kernelwright.check_listed(one, one), torch.sigmoid(one))
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

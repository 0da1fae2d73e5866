"""A calibration notices where the installed PyTorch has bits that no kernel has, and names it."""

import json
import subprocess
import time

import pytest
import torch
import torch.nn.functional as F
from fake_pytorch import reversed_tree, sums_as, sums_by
from typer.testing import CliRunner

import kernelwright as kw
from kernelwright import models
from kernelwright.backends import HOPPER, Unsupported
from kernelwright.backends.cache import KernelCache
from kernelwright.bench.exactness import planned
from kernelwright.calibration import background, calibrate, dependents, finder, functions, verdicts
from kernelwright.calibration.calibrate import _sum
from kernelwright.calibration.gradients import GRADIENTS
from kernelwright.calibration.trees import tree_of
from kernelwright.cli import app
from kernelwright.inject.runtime import model_run
from kernelwright.measure.timing import milliseconds
from kernelwright.ops import ways
from kernelwright.ops.op import registry


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(KernelCache, "default", lambda: KernelCache(tmp_path))
    yield
    ways.use({})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("way", [ways.ATEN, ways.QUACK])
@pytest.mark.parametrize("width", [64, 1152, 2048])
def test_an_order_is_found_from_outside(monkeypatch, way, width, dtype):
    sums_as(monkeypatch, way)
    assert finder.matching_ways("F.rms_norm", width, dtype, "cpu") == [way]


@pytest.mark.parametrize("moved", [1, 17])
def test_an_order_that_differs_in_one_pair_is_not_taken_for_it(monkeypatch, moved):
    """Elements of neighbouring threads change places in ATen's tree."""

    def tree(width, size):
        made = tree_of("F.rms_norm", ways.ATEN, width, 999, size)
        there = {4 * moved: 4 * moved + 4, 4 * moved + 4: 4 * moved}
        made.added = [(there.get(a, a), there.get(b, b)) for a, b in made.added]
        return made

    sums_by(monkeypatch, tree)
    asked = [(4 * moved, 4 * moved + 1, 4 * moved + 4), *finder.triples(256)]
    rows = finder.rows_of(asked, 256, torch.bfloat16, "cpu")
    seen = finder.met_first("F.rms_norm", asked, rows)
    assert seen == tree(256, 2).meet_first(asked)
    assert finder.matching_ways("F.rms_norm", 256, torch.bfloat16, "cpu") == []


@pytest.mark.parametrize("way", [ways.ATEN, ways.QUACK])
def test_the_way_that_pytorch_has_is_taken(monkeypatch, way):
    sums_as(monkeypatch, way)
    found = _sum("F.rms_norm", "cpu")
    assert (found.way, found.differing, found.orders) == (way, 0, (way,))
    assert str(found) == f"F.rms_norm has the bits of {way}"


def test_a_future_pytorch_that_sums_in_reverse_is_noticed_and_named(monkeypatch):
    sums_by(monkeypatch, lambda width, size: reversed_tree(width))
    found = next(f for f in calibrate("cpu") if f.subject == "F.rms_norm")
    assert found.way is None
    assert found.differing > 0
    assert "F.rms_norm" in str(found)
    assert "it sums in no order that is known here" in str(found)
    ways.use(verdicts([found]))
    with pytest.raises(Unsupported, match=r"F\.rms_norm of torch .* has other bits here"):
        planned(registry()["rmsnorm"], "torch", 100, 2048, torch.bfloat16, HOPPER)
    # what does not need it goes on
    assert planned(registry()["rmsnorm"], "diffusers", 100, 2048, torch.bfloat16, HOPPER)


def test_an_op_that_fails_in_pytorch_itself_is_named_and_left_to_it(monkeypatch):
    def broken(*args, **kwargs):
        raise ModuleNotFoundError("no cutlass.cute")

    monkeypatch.setattr(torch.nn.functional, "rms_norm", broken)
    found = {f.subject: f for f in calibrate("cpu")}
    said = "F.rms_norm fails here in PyTorch itself: ModuleNotFoundError: no cutlass.cute"
    assert str(found["F.rms_norm"]) == said
    assert verdicts([found["F.rms_norm"]]) == {"F.rms_norm": None}
    assert found["at::mean"].compared


def test_a_function_with_one_other_bit_is_named(monkeypatch):
    own = torch.exp

    def off_by_one(x):
        y = own(x)
        return torch.where(x == 1.0, torch.nextafter(y, y + 1), y)

    monkeypatch.setattr(torch, "exp", off_by_one)
    found = {f.subject: f for f in calibrate("cpu")}
    assert found["exp"].way is None
    assert found["exp"].differing == 2  # once in each dtype of 16 bits
    assert found["silu"].way == ways.ATEN


def test_every_number_of_16_bits_is_compared():
    for dtype in (torch.bfloat16, torch.float16):
        x = functions.numbers(dtype, "cpu")
        assert x.view(torch.int16).unique().numel() == 1 << 16
    x = functions.numbers(torch.float32, "cpu")
    assert x.isnan().any()
    assert (x.abs() < 1e-38).any()


def test_every_subject_is_compared_or_said_not_to_be():
    found = calibrate("cpu")
    assert {f.subject for f in found} == set(ways.SUBJECTS)
    assert {f.subject for f in found if not f.compared} == {"F.layer_norm", *GRADIENTS}


def test_exact_modes_say_what_they_depend_on():
    found = dependents()
    assert "rmsnorm (torch)" in found["F.rms_norm"]
    assert "rmsnorm (diffusers)" in found["at::mean"]
    assert {"gelu (torch)", "geglu (torch)"} <= set(found["F.gelu"])
    assert "swiglu (torch)" in found["silu"]


def test_what_was_found_is_kept_for_this_environment_alone(monkeypatch):
    assert ways.stored() is None
    ways.keep({"F.rms_norm": ways.QUACK, "exp": None})
    assert ways.stored() == {"F.rms_norm": ways.QUACK, "exp": None}
    installed = ways._version
    monkeypatch.setattr(ways, "_version", lambda p: "9.9" if "cutlass" in p else installed(p))
    assert ways.stored() is None
    monkeypatch.setattr(ways, "_version", installed)
    monkeypatch.setenv("TORCH_DISABLE_NATIVE_JIT", "1")
    assert ways.stored() is None


def test_a_file_that_was_changed_is_not_read(tmp_path):
    ways.keep({"exp": ways.ATEN})
    (path,) = tmp_path.rglob("*.json")
    path.write_bytes(path.read_bytes().replace(b"exp", b"sin"))
    assert ways.stored() is None


def test_quack_chooses_another_kernel():
    ways.use({"F.rms_norm": ways.QUACK})
    launch = planned(registry()["rmsnorm"], "torch", 100, 2048, torch.bfloat16, HOPPER)
    assert "QuackRms" in launch.template
    assert "Spread<2048, 8, 32>" in launch.template


@pytest.mark.parametrize(
    ("built", "compiler", "erf"),
    [
        (None, (13, 4), ways.COMPILER),
        ("13.0", None, ways.COMPILER),
        ("13.0", (13, 1), ways.COMPILER),
        ("13.0", (13, 4), "erf of CUDA 13.0"),
        ("13.2", (13, 0), "erf of CUDA 13.2"),
        ("14.0", (13, 2), ways.COMPILER),
        ("12.8", (13, 0), ways.COMPILER),
    ],
)
def test_the_erf_of_pytorch_is_that_of_the_cuda_it_was_built_with(built, compiler, erf):
    assert ways._guessed_erf(built, compiler) == erf


class TestBackground:
    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 80 << 30))
        monkeypatch.setattr(ways, "environment", lambda: ("torch 9", "a GPU"))
        monkeypatch.setattr(background, "_this_gpu", lambda: None)
        for name in ("KERNELWRIGHT_CALIBRATE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)

    def test_it_runs_where_nothing_was_found_yet(self, monkeypatch):
        assert background.why_not() is None
        ways.keep({"exp": ways.ATEN})
        assert background.why_not() == "it was done before"

    def test_it_can_be_turned_off(self, monkeypatch):
        monkeypatch.setenv("KERNELWRIGHT_CALIBRATE", "0")
        assert "KERNELWRIGHT_CALIBRATE" in background.why_not()

    def test_one_process_of_a_job_does_it(self, monkeypatch):
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert background.why_not() is not None

    def test_it_takes_no_memory_of_a_full_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 80 << 30))
        assert background.why_not() == "the GPU is full"

    def test_it_is_considered_once(self, monkeypatch):
        started = []
        monkeypatch.setattr(background, "_considered", False)
        monkeypatch.setattr(background, "_run", lambda: started.append(1))
        monkeypatch.setattr(background, "_thread", None)
        background.wait()  # for nothing
        for _ in range(3):
            background.consider()
        background.wait()
        assert started == [1]

    def test_no_time_is_taken_before_it_has_ended(self, monkeypatch):
        done, seen = [], []
        monkeypatch.setattr(background, "_considered", False)
        monkeypatch.setattr(background, "_thread", None)
        monkeypatch.setattr(background, "_run", lambda: (time.sleep(0.2), done.append(1)))
        background.consider()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        milliseconds(lambda: seen.append(list(done)), 0.0)
        assert seen == [[1]] * len(seen)

    def test_what_it_finds_is_used_and_what_is_lost_is_named(self, monkeypatch):
        def run(command, **how):
            assert command == background.command()
            ways.keep({"F.rms_norm": None, "exp": ways.ATEN})
            ways.use({})  # another process keeps it, not this one

        monkeypatch.setattr(subprocess, "run", run)
        op = registry()["rmsnorm"]
        op._plans["a plan"] = None
        with pytest.warns(UserWarning, match=r"F\.rms_norm of torch .*: their chains run eager"):
            background._run()
        assert not op._plans
        with pytest.raises(Unsupported):
            ways.way("F.rms_norm")

    def test_plans_stay_where_the_guesses_were_right(self):
        op = registry()["rmsnorm"]
        op._plans["a plan"] = None
        assert background.adopt({"exp": ways.ATEN}) == []
        assert "a plan" in op._plans
        op.forget()


def test_doctor_shows_what_was_compared(monkeypatch):
    sums_by(monkeypatch, lambda width, size: reversed_tree(width))
    result = CliRunner().invoke(app, ["doctor", "--exact", "--json"])
    found = {e["subject"]: e for e in json.loads(result.output)["exact"]}
    assert found["F.rms_norm"]["way"] is None
    assert "rmsnorm (torch)" in found["F.rms_norm"]["chains"]
    assert "it sums in no order that is known here" in found["F.rms_norm"]["says"]
    assert found["silu"]["way"] == ways.ATEN


def test_fused_kernels_do_not_depend_on_pytorchs_ways():
    ways.use(dict.fromkeys(ways.SUBJECTS))
    for name in ("rmsnorm", "gelu", "geglu"):
        assert planned(registry()[name], None, 100, 2048, torch.bfloat16, HOPPER)


def test_gelu_has_its_own_function_in_eager():
    x = functions.numbers(torch.bfloat16, "cpu")
    assert functions.expected("F.gelu", x).nan_to_num().equal(F.gelu(x).nan_to_num())


def test_what_another_process_found_is_read_once_a_gpu_is_in_use(monkeypatch):
    monkeypatch.setattr(ways, "environment", lambda: ("torch 9", "a GPU"))
    ways.keep({"exp": None})
    ways.use({})
    monkeypatch.setattr(ways, "_looked", False)
    assert ways.way("exp") == ways.ATEN  # CUDA is not in use: nothing is asked of it
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(Unsupported, match="exp of torch"):
        ways.way("exp")


@pytest.mark.parametrize(("numerics", "times"), [("exact", 2), ("fused", 0)])
def test_a_forward_of_an_exact_model_on_a_gpu_considers_it(monkeypatch, numerics, times):
    considered = []
    monkeypatch.setattr(background, "consider", lambda: considered.append(1))
    model = models.build("llama-3-8b", tiny=True, device="cpu", dtype=torch.float32)
    inputs = models.inputs("llama-3-8b", tiny=True, device="cpu", dtype=torch.float32)
    with torch.no_grad(), kw.injected(model, numerics=numerics):
        model(**inputs)
        assert considered == []  # there is no GPU
        monkeypatch.setattr(model_run, "device_type", lambda args, kwargs: "cuda")
        model(**inputs)
        model(**inputs)
    assert len(considered) == times

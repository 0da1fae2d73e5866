"""The skill's evaluation: right solutions pass its hidden tests, stubs and wrong kernels do not.

`solutions/` has two packages that were made by following the skill alone.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from plugged import change, plugged
from typer.testing import CliRunner

from kernelwright.checking import emulator
from kernelwright.cli import app
from kernelwright.ops.case import Inputs
from kernelwright.scaffold import create
from kernelwright.skill import evaluation, files
from kernelwright.skill.evaluation.hidden_cases import LAYOUTS, hidden_cases
from kernelwright.skill.evaluation.score import HIDDEN, _close

SOLUTIONS = Path(__file__).with_name("solutions")
NO_GPU = not torch.cuda.is_available()
KINDS = {"squared_relu": ("triton", "elementwise"), "norm_then_gate": ("cuda", "gated")}
# where kernels break most; `kernelwright skill eval score` takes all
FEW = ("rows", "odd width", "slice", "storage offset", "no weight")


def invoke(*args):
    return CliRunner().invoke(app, ["skill", "eval", *map(str, args)], env={"COLUMNS": "200"})


def solution(name, folder):
    """The package as its maker would have it."""
    language, kind = KINDS[name]
    created = create(name, language, kind, folder / name)
    for file in (SOLUTIONS / name).iterdir():
        shutil.copyfile(file, created.root / "src" / name / file.name)
    return created


def scored(name, language, groups=HIDDEN, cases=FEW):
    found = evaluation.score(evaluation.find(name), language, None, groups, cases)
    return found, {g.name: g for g in found.groups}


@pytest.mark.skipif(not NO_GPU, reason="kernels are interpreted where there is no GPU")
def test_a_right_solution_in_triton_with_its_gradients_is_solved(tmp_path):
    with plugged(solution("squared_relu", tmp_path)):
        found, groups = scored("squared_relu", "triton")
    assert found.solved, groups
    assert found.share == 1
    assert groups["kernel"].total == 12
    assert groups["gradients"].total == 8
    assert "interpreted, no GPU" in found.seen


@pytest.mark.skipif(not NO_GPU, reason="CUDA C++ is emulated where there is no GPU")
@pytest.mark.skipif(emulator.problem() is not None, reason="no g++")
def test_a_right_solution_in_cuda_is_solved_and_a_wrong_kernel_is_not(tmp_path):
    created = solution("norm_then_gate", tmp_path)
    with plugged(created):
        found, groups = scored("norm_then_gate", "cuda")
        assert found.solved, groups
        assert "emulated by g++" in found.seen
        # sigmoid where SiLU was asked for: the reference is still right
        change(created.kernel, "logistic<FAST>(g, g)", "logistic<FAST>(1.f, g)")
        found, groups = scored("norm_then_gate", "cuda", ("reference", "kernel"))
    assert not found.solved
    assert groups["reference"].held == groups["reference"].total
    assert groups["kernel"].held == 0
    assert "over the bar" in groups["kernel"].failures[0]


def test_a_verdict_names_the_groups_that_fall_short():
    right = (evaluation.Group("kernel", 2, 2), evaluation.Group("own checks", 2, 2))
    wrong = (right[0], evaluation.Group("own checks", 1, 2, ("a case: why",)))
    unseen = (evaluation.Group("kernel", 0, 0, skipped="no g++"), right[1])
    told = [evaluation.Score("reglu", "cuda", "", g).verdict for g in (right, wrong, unseen)]
    assert told[0] == "solved"
    assert told[1] == "not solved: 100% of the hidden tests hold; incomplete: own checks"
    assert told[2] == "not solved: 0% of the hidden tests hold; incomplete: kernel"


@pytest.mark.skipif(not NO_GPU, reason="kernels are interpreted where there is no GPU")
def test_an_unchanged_template_is_not_a_solution(tmp_path):
    with plugged(create("reglu", "triton", "gated", tmp_path / "op")):
        found, groups = scored("reglu", "triton")
    assert not found.solved
    assert "backward= is declared: no backward= is declared" in groups["interface"].failures
    for name in ("reference", "kernel", "gradients"):
        assert groups[name].held == 0, name


def test_the_other_language_is_not_a_solution(tmp_path):
    with plugged(create("mish", "triton", "elementwise", tmp_path / "op")):
        _, groups = scored("mish", "cuda", ("interface",))
    said = " ".join(groups["interface"].failures)
    assert "cuda is there: it has torch, triton" in said
    assert "triton was not asked for" in said
    assert "arguments: it takes input, beta" in said


@pytest.mark.parametrize("request_", evaluation.REQUESTS.values(), ids=lambda r: r.name)
def test_every_request_is_fair(request_):
    """Eager computes the truth, in every hidden case, and the prompt gives all that is tested."""
    for case in hidden_cases(request_):
        wide = {
            n: a.double() if isinstance(a, torch.Tensor) else a
            for n, a in case.arguments(Inputs(torch.float32)).items()
        }
        assert tuple(wide) == request_.arguments
        truth = request_.truth(**wide)
        eager = request_.eager(**{
            n: a.float() if isinstance(a, torch.Tensor) else a for n, a in wide.items()
        })  # fmt: skip
        torch.testing.assert_close(eager.double(), truth, rtol=1e-4, atol=1e-5)
    text = evaluation.prompt(request_, "triton")
    assert request_.asks in text
    assert ("backward=" in text) == request_.backward
    for name in request_.arguments:
        assert name in text
    assert "backward=" not in evaluation.prompt(request_, "cuda")


@pytest.mark.parametrize("request_", evaluation.REQUESTS.values(), ids=lambda r: r.name)
def test_every_request_can_be_solved(request_):
    """The formula in float32 with one rounding meets the bar of every hidden case."""

    def right(arguments):
        wide = {n: a.float() if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
        first = next(iter(arguments.values()))
        return request_.truth(**wide).to(first.dtype)

    for name, hold in _close(request_, list(hidden_cases(request_)), right, "cpu"):
        try:
            hold()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_there_are_ten_and_no_file_of_the_skill_has_an_answer():
    assert len(evaluation.REQUESTS) == 10
    assert sum(r.backward for r in evaluation.REQUESTS.values()) == 2
    assert len(LAYOUTS) > 12
    assert not any("evaluation" in file.parts for file in files())


def test_list_prompt_and_a_wrong_name():
    listed = json.loads(invoke("list", "--json").stdout)
    assert [r["name"] for r in listed] == list(evaluation.REQUESTS)
    assert "softcap" in invoke("list").output
    shown = invoke("prompt", "softcap", "--language", "cuda").output
    assert "Add an op softcap in CUDA C++" in shown
    assert "softcap(input, cap=30.0)" in shown
    wrong = invoke("prompt", "softcup", "--language", "cuda")
    assert wrong.exit_code == 2
    assert "did you mean softcap" in wrong.output
    wrong = invoke("prompt", "softcap", "--language", "hip")
    assert wrong.exit_code == 2
    assert "expected triton or cuda" in wrong.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--folder", "nowhere"), "nowhere has no package 'softcap'"),
        ((), "no op 'softcap' is declared: name its folder with --folder"),
    ],
)
def test_a_solution_that_is_not_there_is_one_line(options, says):
    done = invoke("score", "softcap", "--language", "triton", *options)
    assert done.exit_code == 1
    assert says in done.output
    assert done.output.count("\n") == 1

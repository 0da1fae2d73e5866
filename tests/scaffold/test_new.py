"""`kernelwright new`: what it makes works as it is, in the language asked for."""

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from everything import share
from plugged import environment, plugged
from typer.testing import CliRunner

import kernelwright.ops
from kernelwright.checking.cubins import cubins
from kernelwright.checking.promises import promises
from kernelwright.cli import app
from kernelwright.errors import CannotRun
from kernelwright.ops.declared_ops import declared
from kernelwright.ops.op import registry
from kernelwright.scaffold import KINDS, LANGUAGES, create
from kernelwright.scaffold.create import WITH_BACKWARD

ROOT = Path(__file__).parents[2]


def invoke(*args):
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "300"})


def named(language, kind):
    return f"made_{language}_{kind.replace('-', '_')}"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A package of each kind in each language."""
    folder = tmp_path_factory.mktemp("packages")
    return {
        (language, kind): create(name, language, kind, folder / name)
        for language in LANGUAGES
        for kind in KINDS
        if (name := named(language, kind))
    }


@pytest.mark.slow
def test_the_tests_of_every_kind_are_green(tmp_path):
    """As a person runs them, in an interpreter of its own, with kernels in both languages."""
    made = [
        create(name, "triton,cuda", kind, tmp_path / name, backward=kind in WITH_BACKWARD)
        for kind in share(KINDS, 4, start=2)
        if (name := named("both", kind))
    ]
    known = environment(ROOT / "src", *(c.root / "src" for c in made))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "-rA"]
        + [str(c.root / "tests") for c in made],
        env={n: v for n, v in known.items() if n != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    passed = [line for line in done.stdout.splitlines() if line.startswith("PASSED")]
    for created in made:
        own = [line for line in passed if f"test_{created.name}[" in line]
        assert len(own) > 40
        assert any("triton: odd width" in x or "triton: width 33" in x for x in own)
        gradients = [x for x in own if "triton: gradients, expanded, bfloat16" in x]
        assert len(gradients) == (created.kind in WITH_BACKWARD)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_in_the_language_asked_for_and_in_no_other(made, language, kind):
    """A CUDA one is compiled, for an old and a new GPU; Triton's are by `kernelwright check`."""
    created = made[language, kind]
    kernels = {f for f in created.files if Path(f).stem in LANGUAGES}
    assert {Path(f).name for f in kernels} == set(LANGUAGES[language])
    (other,) = LANGUAGES.keys() - {language}
    for file in created.files:
        if "/src/" in f"/{file}":
            code = (created.root / file).read_text()
            assert f'"{other}"' not in code
            assert f"backends.{other}" not in code
    with plugged(created):
        op = registry()[created.name]
        assert op.backends == ("torch", language)
        if language == "triton":
            return
        pytest.importorskip("cuda.core")
        found = cubins(op, "cuda", ("sm_75", "sm_90"))
    assert {c.arch for c in found} == {"sm_75", "sm_90"}
    assert all(c.used.clean and c.used.registers for c in found), found


def test_one_op_may_have_kernels_in_both_languages(tmp_path):
    out = tmp_path / "op"
    result = invoke("new", "made_both", "--language", "triton,cuda", "--out", str(out))
    assert result.exit_code == 0, result.output
    folder = out / "src" / "made_both"
    assert {"triton.py", "cuda.py", "cuda.cuh"} < {p.name for p in folder.iterdir()}
    text = (folder / "__init__.py").read_text()
    assert 'backends=("torch", "triton", "cuda")' in text
    assert 'backend: "torch", "triton" or "cuda"; None' in text
    assert "kernelwright[cuda]" in (out / "pyproject.toml").read_text()


def test_what_is_made_is_formatted_and_lint_clean(tmp_path):
    for number, (language, kind) in enumerate(
        itertools.product((*LANGUAGES, "triton,cuda"), KINDS)
    ):
        for name in (f"made{number}", f"made{number}_{'x' * 25}"):
            backward = "triton" in language and kind in WITH_BACKWARD
            create(name, language, kind, package=checkout(tmp_path), backward=backward)
            create(name, language, kind, tmp_path / "alone" / name, backward=backward)
    folders = [str(p) for p in (tmp_path / "alone").iterdir()]
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache"]
        config = ["--config", str(ROOT / "pyproject.toml")]
        for run in ([*ruff, *folders], [*ruff, *config, str(tmp_path / "src")]):
            done = subprocess.run(run, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


def checkout(folder):
    """The package folder of something that looks like a checkout."""
    package = folder / "src" / "kernelwright"
    (package / "ops").mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").touch()
    return package


@pytest.fixture
def among_ours(tmp_path, monkeypatch):
    """The ops of a checkout beside our own."""
    package = checkout(tmp_path)
    monkeypatch.setattr(kernelwright.ops, "__path__", [*kernelwright.ops.__path__])
    kernelwright.ops.__path__.append(str(package / "ops"))
    known = dict(declared)
    yield package
    declared.clear()
    declared.update(known)


def test_a_folder_under_ops_is_an_op_like_the_others(among_ours):
    created = create("made_under_ops", "triton", "row-reduction", package=among_ours)
    assert created.root == among_ours / "ops" / "made_under_ops"
    assert not created.alone
    module = importlib.import_module("kernelwright.ops.made_under_ops")
    assert torch.equal(
        module.made_under_ops(torch.tensor([[3.0, 4.0]]), eps=0.0), torch.tensor([[0.6, 0.8]])
    )
    every = list(promises(registry()["made_under_ops"]))
    broken = {p.name: p.broken() for p in every if p.name.startswith("triton: ")}
    assert len(broken) > 30
    assert not {name: why for name, why in broken.items() if why}


def test_a_cuda_folder_under_ops_includes_its_header_as_ours_do(among_ours):
    create("made_cuda_under_ops", "cuda", "gated", package=among_ours)
    text = (among_ours / "ops/made_cuda_under_ops/cuda.py").read_text()
    assert 'source="ops/made_cuda_under_ops/cuda.cuh"' in text
    assert "Path" not in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Soft-Cap", "such as 'soft_cap'"),
        ("2fast", "such as 'op_2fast'"),
        ("a" * 33, "of up to 32"),
        ("sum", "is a word of Python"),
        ("lambda", "is a word of Python"),
        ("triton", "is the name of a part of every op"),
        ("rmsnorm", "there is an op 'rmsnorm' already"),
        ("inject", "is taken"),
        ("json", "is taken"),
        ("scaffold", "is taken"),
    ],
)
def test_a_name_that_cannot_be_is_refused_in_one_line(name, says, tmp_path):
    result = invoke("new", name, "--language", "triton", "--out", str(tmp_path / "op"))
    assert result.exit_code == 2
    assert says in result.output
    assert not (tmp_path / "op").exists()


def test_a_folder_under_ops_is_not_written_over(tmp_path):
    package = checkout(tmp_path)
    create("made_once", "cuda", package=package)
    with pytest.raises(ValueError, match="'made_once' is taken"):
        create("made_once", "triton", package=package)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--language", "hip", "expected triton or cuda"),
        ("--language", "triton,triton", "or both: triton,cuda"),
        ("--kind", "norm", "row-reduction"),
    ],
)
def test_a_language_or_kind_there_is_not_is_named(option, value, says, tmp_path):
    given = {"--language": "cuda", "--kind": "gated", "--out": str(tmp_path / "op")}
    given[option] = value
    result = invoke("new", "made_wrong", *(word for pair in given.items() for word in pair))
    assert result.exit_code == 2
    assert value in result.output
    assert says in result.output
    assert not (tmp_path / "op").exists()


@pytest.mark.parametrize(
    ("language", "kind", "says"),
    [("cuda", "gated", "--language triton,cuda"), ("triton", "row-reduction", "elementwise")],
)
def test_a_backward_there_is_no_template_for_is_refused(language, kind, says, tmp_path):
    given = ("--language", language, "--kind", kind, "--out", str(tmp_path / "op"))
    result = invoke("new", "made_backward", *given, "--backward")
    assert result.exit_code == 1
    assert says in result.output
    assert "autograd differentiates the reference" in result.output
    assert not (tmp_path / "op").exists()


def test_the_language_is_never_guessed():
    result = invoke("new", "made_somehow")
    assert result.exit_code == 2
    assert "--language" in result.output


def test_an_installed_kernelwright_says_to_use_out(tmp_path):
    package = tmp_path / "site-packages" / "kernelwright"
    (package / "ops").mkdir(parents=True)
    with pytest.raises(CannotRun, match="use --out FOLDER"):
        create("made_nowhere", "triton", package=package)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("")
    result = invoke("new", "made_over", "--language", "cuda", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "not an empty folder" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_it_ends_with_the_tree_and_the_next_three_commands(tmp_path):
    out = str(tmp_path / "op")
    result = invoke("new", "made_shown", "--language", "cuda", "--kind", "gated", "--out", out)
    assert result.exit_code == 0
    assert "cuda.cuh" in result.output
    *_, first, second, third = result.output.rstrip().splitlines()
    assert first.split() == ["pip", "install", "-e", out]
    assert second.split() == ["kernelwright", "check", "made_shown"]
    assert third.split() == ["pytest", f"{out}/tests"]


def test_json_lists_the_files(tmp_path):
    out = tmp_path / "op"
    result = invoke("new", "made_listed", "--language", "triton", "--out", str(out), "--json")
    listed = json.loads(result.stdout)["files"]
    assert {Path(f) for f in listed} == {p for p in out.rglob("*") if p.is_file()}

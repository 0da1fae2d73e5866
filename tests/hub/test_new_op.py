"""A new op is a new folder and nothing else: the Hub's build files, its package and the profiler
find it by its declaration."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plugged import environment

from kernelwright.hub import extension
from kernelwright.scaffold import create

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).resolve().parents[2]
PARTS = ("pyproject.toml", "src", "hub/ltx-kernels")
OPS = {"sharpened": ("cuda", "row-reduction"), "mellowed": ("triton", "gated")}

# in an interpreter of its own, which sees the new folders
BUILD = """
import json, sys
from pathlib import Path
from typer.testing import CliRunner
from kernelwright.cli import app
from kernelwright.profiling.categories import category
from kernelwright.profiling.our_kernels import pattern

out = Path(sys.argv[1])
for command in (
    ["source", "--out", str(out / "source"), "--project", sys.argv[2]],
    ["build", "--out", str(out / "package"), "--variant", "torch-cpu"],
    ["check", str(out / "package")],
):
    result = CliRunner().invoke(app, ["hub", *command])
    assert result.exit_code == 0, result.output
print(json.dumps({"pattern": pattern(), **{name: category(name) for name in sys.argv[3:]}}))
"""


def run(code, checkout, *args):
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env=environment(checkout / "src") | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this tree with two more ops, made as `kernelwright new` makes them."""
    folder = tmp_path_factory.mktemp("checkout")
    built = shutil.ignore_patterns("__pycache__", "build", "*.tmp~")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=built)
        else:
            shutil.copy(ROOT / part, folder / part)
    before = contents(folder)
    for name, (language, kind) in OPS.items():
        create(name, language, kind, package=folder / "src/kernelwright")
    after = contents(folder)
    changed = {path for path in after if after[path] != before.get(path)}
    assert before.keys() <= after.keys()
    assert {path.parent for path in changed} == {Path("src/kernelwright/ops", n) for n in OPS}
    return folder


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory):
    """What `kernelwright hub` builds of it, and what the profiler takes its kernels for."""
    out = tmp_path_factory.mktemp("out")
    names = ("kernelwright_sharpened", "kernelwright_sharpened_3", "mellowed_kernel")
    said = run(BUILD, checkout, str(out), str(checkout / "hub/ltx-kernels"), *names)
    return out, json.loads(said.splitlines()[-1])


def test_the_build_files_name_its_sources_and_instances(built):
    source = built[0] / "source"
    config = tomllib.loads((source / "build.toml").read_text())
    assert "mellowed" not in config["kernel"], "it has no CUDA kernel"
    own = config["kernel"]["sharpened"]["src"]
    assert {"cuda/sharpened.cu", "cuda/sharpened.inc"} <= set(own)
    # the header of the op, and those that it includes
    assert {"include/ops/sharpened/cuda.cuh", "include/backends/common.cuh"} <= set(own)
    assert all((source / file).is_file() for file in own)
    lines = (source / "cuda/sharpened.inc").read_text().splitlines()
    templates = [re.fullmatch(r"INSTANCE\(\d+, \d+, [\w:]+, (.*)\)", x)[1] for x in lines]
    assert len(templates) > 2
    assert all(t.startswith("kernelwright::sharpened_kernel<") for t in templates)
    assert '"ops/sharpened/cuda.cuh"' in (source / "cuda/sharpened.cu").read_text()
    assert "&family_sharpened" in (source / "cuda/families.h").read_text()
    card = (source / "CARD.md").read_text()
    assert all(f"| `{name}` |" in card for name in OPS)


def test_the_package_has_it_and_the_hub_would_take_it(built):
    """`hub check` found nothing to fix, which loads the package too."""
    variant = built[0] / "package/build/torch-cpu"
    for name, (language, _) in OPS.items():
        assert (variant / "ops" / name / f"{language}.py").is_file()
    assert (variant / "ops/sharpened/cuda.cuh").is_file()


def test_the_profiler_knows_its_kernels(built):
    found = built[1]
    assert re.match(found["pattern"], "mellowed_kernel")
    assert re.match(found["pattern"], "kernelwright_sharpened")
    assert found["kernelwright_sharpened"] == found["kernelwright_sharpened_3"] == "norm"
    assert found["mellowed_kernel"] == "activation"


@pytest.mark.skipif(extension.compiler() is None, reason="nvcc is not installed")
def test_nvcc_compiles_its_generated_file(built, tmp_path):
    """One instance, without the assembler."""
    source = built[0] / "source"
    first = (source / "cuda/sharpened.inc").read_text().splitlines()[0]
    (tmp_path / "sharpened.inc").write_text(f"{first}\n")
    unit = shutil.copy(source / "cuda/sharpened.cu", tmp_path)
    folders = [f"-I{p}" for p in (tmp_path, source / "cuda", source / "include")]
    command = [extension.compiler(), "-arch=compute_90", "-ptx", *folders, unit, "-o", "out.ptx"]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert "kernelwright_sharpened_0" in (tmp_path / "out.ptx").read_text()

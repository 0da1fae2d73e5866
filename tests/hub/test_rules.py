"""`kernelwright hub check`: what the Hub demands, each failure one line with its fix."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from kernelwright import hub
from kernelwright.cli import app
from kernelwright.hub.digest import seal


@pytest.fixture
def copied(package, tmp_path):
    """A small variant that a test may break: two files of ours beside those all kernels have."""
    ours = package / "build" / "torch-cpu"
    place = tmp_path / "kernel" / "build" / "torch-cpu"
    for name in ("metadata.json", "_ops.py", "ops/op.py", "layers/norms.py"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ours / name).read_text()
        # what it imports of the package is not there
        lines = [x for x in text.splitlines() if not x.startswith("from .")]
        (place / name).write_text("\n".join(lines) + "\n")
    (place / "layers" / "__init__.py").touch()
    (place / "__init__.py").write_text("__all__ = ['f']\n")
    seal(place)
    assert hub.check(place.parents[1], load=False) == []
    return place


def test_our_package_has_nothing_to_fix(package):
    run = CliRunner().invoke(app, ["hub", "check", str(package)])
    assert run.exit_code == 0, run.output
    assert "nothing to fix" in run.output


def test_a_folder_without_a_variant_says_how_to_build_one(tmp_path):
    run = CliRunner().invoke(app, ["hub", "check", str(tmp_path), "--json"])
    assert run.exit_code == 1
    (failure,) = json.loads(run.output)
    assert "hub build" in failure["fix"]


def edit(**changes):
    def change(variant):
        path = variant / "metadata.json"
        content = json.loads(path.read_text()) | {
            k.replace("_", "-"): v for k, v in changes.items()
        }
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return change


def append(path, text):
    def change(variant):
        with open(variant / path, "a") as file:
            file.write(f"\n\n{text}\n")

    return change


def remove(path):
    return lambda variant: (variant / path).unlink()


LAYER = "class Mine(nn.Module):\n    can_torch_compile = True\n    {}\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (remove("metadata.json"), "metadata.json: it is not there"),
        (append("metadata.json", "}"), "no JSON"),
        (edit(name="ltx_kernels"), "name 'ltx_kernels' is refused"),
        (edit(id="ltx-kernels"), "id 'ltx-kernels' is refused"),
        (edit(version="1"), "version is '1'"),
        (edit(version=-1), "version is -1"),
        (edit(digest=None), "no 'digest'"),
        (edit(digest={"algorithm": "md5", "files": {}}), "no digest with algorithm 'sha256'"),
        (edit(license=None), "no 'license'"),
        (edit(backend={"type": "triton"}), "backend is 'triton'"),
        (edit(python_depends=["triton"]), "python-depends names 'triton'"),
        (remove("__init__.py"), "no __init__.py"),
        (remove("_ops.py"), "no _ops.py"),
        (append("ops/op.py", "import kernelwright"), "imports kernelwright"),
        (append("ops/op.py", "import numpy"), "imports numpy"),
        (append("ops/op.py", "from ... import x"), "leaves the package"),
        (append("ops/op.py", "from .lost import x"), "lost, which is not there"),
        (append("ops/op.py", "torch.library.Library('fixed', 'DEF')"), "fixed name 'fixed'"),
        (append("ops/op.py", "torch.library.custom_op('a::b')"), "custom_op with the fixed"),
        (append("layers/norms.py", LAYER.format("size = 3")), "Mine.size is one member too many"),
        (append("layers/norms.py", LAYER.format("def more(self): ...")), "Mine.more is one"),
        (append("layers/norms.py", LAYER.format("def __init__(self): ...")), "a constructor"),
        (append("layers/norms.py", "class Mine(nn.Module): ..."), "whether it compiles"),
        (append("ops/op.py", "def"), "no Python"),
    ],
)
def test_what_the_hub_would_refuse_is_one_line_with_its_fix(copied, change, says):
    change(copied)
    metadata = copied / "metadata.json"
    if "digest" not in says and metadata.is_file() and "no JSON" not in says:
        seal(copied)  # the digest is right, the rest is not
    failures = hub.check(copied.parents[1], load=False)
    assert len(failures) == 1, failures
    line = str(failures[0])
    assert says in line
    assert "\n" not in line
    assert failures[0].fix


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (append("ops/op.py", "pass"), "ops/op.py has other content than its hash says"),
        (lambda variant: (variant / "more.json").write_text("{}"), "more.json is on disk and not"),
        (remove("layers/norms.py"), "layers/norms.py is in the digest and not on disk"),
    ],
)
def test_a_file_that_the_digest_does_not_know_is_refused(copied, change, says):
    change(copied)
    (failure,) = hub.check(copied.parents[1], load=False)
    assert says in str(failure)
    assert "build the package again" in failure.fix


def test_two_variants_of_one_name_are_refused(copied):
    shutil.copytree(copied, copied.with_name("torch-cuda"))
    (failure,) = hub.check(copied.parents[1], load=False)
    assert "id of its own" in failure.fix


def test_a_package_that_fails_to_load_is_refused(copied):
    edit(id="_ltx_kernels_that_fails")(copied)
    append("__init__.py", "raise RuntimeError('not today')")(copied)
    seal(copied)
    (failure,) = hub.check(copied.parents[1])
    assert "RuntimeError: not today" in failure.problem

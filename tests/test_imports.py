"""`import kernelwright` is cheap and quiet: no GPU, no compiler, no library it may not need."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("triton", "diffusers", "transformers", "cuda", "typer", "rich", "matplotlib")
SOURCES = Path(__file__).resolve().parents[1] / "src"


# what a new interpreter sees; it is asked once for all that follows, for torch is slow to import
PROBE = f"""
import json, os, sys
import torch

before, started, written, gpu = set(sys.modules), [], [], []
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn")

def heavy():
    new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
    return [name for name in {HEAVY!r} if name in new]

def hear(event, args):
    if event in STARTS:
        started.append(event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        written.append(str(args[0]))
    if event in ("os.mkdir", "os.rename"):
        written.append(str(args[0]))

def refuse(name):
    return lambda *args, **kwargs: gpu.append(name) or 0

usual = {{}}
for name in ("device_count", "is_available", "get_device_capability", "get_device_properties",
             "current_device", "init", "_lazy_init"):
    usual[name] = getattr(torch.cuda, name)
    setattr(torch.cuda, name, refuse(name))
sys.addaudithook(hear)

import kernelwright

seen = {{"imported": heavy(), "started": list(started), "written": list(written)}}
seen["gpu"] = [*gpu, *(["initialized"] if torch.cuda.is_initialized() else [])]
for name, function in usual.items():
    setattr(torch.cuda, name, function)

torch.set_num_threads(1)
x = torch.arange(16.0).view(2, 8)
expected = kernelwright.rmsnorm(x)
seen["called"] = heavy()

if hasattr(os, "fork"):
    child = os.fork()
    if child == 0:
        same = torch.equal(kernelwright.rmsnorm(x), expected)
        new = kernelwright.layernorm(x).isfinite().all().item()
        os._exit(0 if same and new else 1)
    seen["forked"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

import kernelwright.cli

seen["cli"] = [name for name in heavy() if name not in ("typer", "rich")]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    cache = tmp_path_factory.mktemp("imports") / "cache"
    places = {"PYTHONPATH": str(SOURCES), "KERNELWRIGHT_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=os.environ | places | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"cache": cache.exists()}


def test_importing_loads_nothing_heavy(seen):
    assert seen["imported"] == []


def test_calling_on_the_cpu_loads_nothing_heavy(seen):
    assert seen["called"] == []


def test_importing_touches_no_gpu_and_starts_no_process(seen):
    assert seen["gpu"] == []
    assert seen["started"] == []


def test_importing_writes_no_file(seen):
    assert seen["written"] == []
    assert not seen["cache"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_ops_work_after_a_fork(seen):
    assert seen["forked"] == 0


def test_the_command_line_starts_without_triton_and_models(seen):
    assert seen["cli"] == []


@pytest.mark.parametrize("part", ["ops", "backends"])
def test_ops_and_backends_stand_alone(part):
    """They are what a Hub package is built from: relative imports of each other, torch, triton."""
    package = SOURCES / "kernelwright"
    outside = {"torch", "triton", "numpy"} | sys.stdlib_module_names
    for file in (package / part).rglob("*.py"):
        above = len(file.relative_to(package).parts)
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level >= above:
                names = [node.module] if node.module else [a.name for a in node.names]
                inside = {n.partition(".")[0] for n in names}
                assert node.level == above, f"{file}: leaves the package"
                assert inside <= {"ops", "backends"}, f"{file}: {inside}"
            elif isinstance(node, ast.ImportFrom | ast.Import) and not getattr(node, "level", 0):
                names = [a.name for a in node.names]
                found = {getattr(node, "module", n).partition(".")[0] for n in names}
                assert "kernelwright" not in found, f"{file}: an absolute import"
                # inside a function, an extra may be asked for
                assert node not in tree.body or found <= outside, f"{file}: {found}"

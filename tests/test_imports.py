"""`import kernelwright` is cheap and quiet: no GPU, no compiler, no optional library. Imports run
one way: no cycle of files, and no package imports one above it."""

import ast
import itertools
import json
import os
import subprocess
import sys

import pytest
from import_graph import SOURCES, cycles, imports, modules, shown

HEAVY = ("triton", "diffusers", "transformers", "cuda", "typer", "rich", "matplotlib")
# The parts of kernelwright: each may import those before it. "kernelwright" is its __init__.py.
PARTS = (
    *("errors", "close_names", "docstring_lines", "gpus", "library_internals", "place", "progress"),
    *("backends", "ops", "catalog", "fuser", "calibration", "inject", "models"),
    *("measure", "profiling", "bench", "checking", "hub", "kernelwright"),
    *("doctor", "video", "report", "demo_picture", "demo", "scaffold", "skill"),
    *("commands", "cli", "__main__"),
    *("skill.scripts", "ltx_kernels"),
)
# the folders of `inject` in the same way; its own files are "inject"
INJECT = (
    *("state", "identify", "runtime", "graphs", "verify", "reuse", "training"),
    *("fp8", "fusions", "recipes", "report", "inject"),
)

# state of a new interpreter; run once for all tests, since torch is slow to import
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
    """The Hub package is built from them: they import each other relatively, torch and triton."""
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
                # inside a function, an extra may be imported
                assert node not in tree.body or found <= outside, f"{file}: {found}"


@pytest.fixture(scope="module")
def graph():
    return imports(modules())


def test_no_two_files_import_each_other(graph):
    found = [
        "\n  ".join(shown(a, b, graph) for a, b in itertools.pairwise(cycle))
        for cycle in cycles(graph)
    ]
    assert not found, "cycles of imports:\n  " + "\n\n  ".join(found)


def part(module):
    """The part of kernelwright that a module belongs to."""
    top, *below = module.split(".")
    if top != "kernelwright" or not below:
        return top
    return "skill.scripts" if below[:2] == ["skill", "scripts"] else below[0]


def room(module):
    """The folder of `inject` that a module belongs to, None outside of it."""
    _, *below = module.split(".")
    if below[:1] != ["inject"]:
        return None
    folder = (SOURCES / module.replace(".", "/")).is_dir() or len(below) > 2
    return below[1] if folder and len(below) > 1 else "inject"


@pytest.mark.parametrize(
    ("place", "order"), [(part, PARTS), (room, INJECT)], ids=["kernelwright", "inject"]
)
def test_a_part_imports_only_those_before_it(graph, place, order):
    unknown = {place(m) for m in modules()} - {*order, None}
    assert not unknown, f"{unknown} is in no order: give it its place in {__file__}"
    against = [
        f"{shown(module, target, graph)}: {place(target)} comes after {place(module)}"
        for module in graph
        for target in graph[module]
        if place(module) and place(target)
        if order.index(place(target)) > order.index(place(module))
    ]
    assert not against, "imports against the order:\n  " + "\n  ".join(against)


def test_an_import_against_the_order_is_named(tmp_path):
    """In a function, under TYPE_CHECKING, or through a third file."""
    files = {
        "low.py": "def f():\n    from .high import g\n",
        "high.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import mid\n",
        "mid.py": "import package.low\n",
        "__init__.py": "from .low import f\n",
    }
    (tmp_path / "package").mkdir()
    for name, text in files.items():
        (tmp_path / "package" / name).write_text(text)
    graph = imports(modules(tmp_path))
    (cycle,) = cycles(graph)
    assert sorted(set(cycle)) == ["package.high", "package.low", "package.mid"]
    assert shown("package.low", "package.high", graph) == (
        "package.low imports package.high (line 2)"
    )

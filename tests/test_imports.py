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


def fresh(code, **environment):
    """The JSON that `code` prints in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(SOURCES)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOADED = f"""
import json, sys
import torch
before = set(sys.modules)
import kernelwright
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(json.dumps([name for name in {HEAVY!r} if name in new]))
"""


def test_importing_loads_nothing_heavy():
    assert fresh(LOADED) == []


def test_calling_on_the_cpu_loads_nothing_heavy():
    call = "import kernelwright\nkernelwright.rmsnorm(torch.ones(2, 8))"
    assert fresh(LOADED.replace("import kernelwright", call)) == []


def test_importing_touches_no_gpu_and_starts_no_process():
    code = """
import json, sys
import torch
seen = []
watched = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn")
sys.addaudithook(lambda event, args: seen.append(event) if event in watched else None)

def refuse(*args, **kwargs):
    seen.append("a GPU was asked for")
    return 0

for name in ("device_count", "is_available", "get_device_capability", "get_device_properties",
             "current_device", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
import kernelwright
print(json.dumps([seen, torch.cuda.is_initialized()]))
"""
    assert fresh(code) == [[], False]


def test_importing_writes_no_file(tmp_path):
    code = """
import json, sys
import torch
opened = []
def hook(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        opened.append(str(args[0]))
    if event in ("os.mkdir", "os.rename"):
        opened.append(str(args[0]))
sys.addaudithook(hook)
import kernelwright
print(json.dumps(opened))
"""
    places = {"KERNELWRIGHT_CACHE": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    assert fresh(code, **places) == []
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_ops_work_after_a_fork():
    code = """
import json, os
import torch
import kernelwright
torch.set_num_threads(1)
x = torch.arange(16.0).view(2, 8)
expected = kernelwright.rmsnorm(x)
child = os.fork()
if child == 0:
    same = torch.equal(kernelwright.rmsnorm(x), expected)
    new = kernelwright.layernorm(x).isfinite().all().item()
    os._exit(0 if same and new else 1)
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
    assert fresh(code) == 0


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

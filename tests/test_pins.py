"""`make pins`: what uv resolves becomes constraints.txt."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "refresh_pins.py"
FOUND = """\
cuda-bindings==13.5.0 ; sys_platform == 'linux'
numpy==2.2.6 ; python_full_version < '3.11' and sys_platform == 'linux'
numpy==2.4.6 ; python_full_version >= '3.11' and sys_platform == 'linux'
tomli==2.5.0 ; python_full_version < '3.11' and sys_platform == 'linux'
torch==9.9 ; sys_platform == 'linux'
triton==3.9.0 ; sys_platform == 'linux'
typer==0.29.0
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("refresh_pins", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_package_has_its_pin_and_a_marker_where_pythons_differ(script):
    pins = [x for x in script.written("2.13.0", FOUND).splitlines() if x and x[0] != "#"]
    assert pins == [
        "torch==2.13.0",
        "cuda-bindings==13.5.0",
        "triton==3.9.0",
        "numpy==2.2.6; python_full_version < '3.11'",
        "numpy==2.4.6; python_full_version >= '3.11'",
        "tomli==2.5.0",
        "typer==0.29.0",
    ]


def test_the_makefile_reads_what_it_writes(script):
    """It takes torch's version from one line, and leaves out what a CUDA build pins itself."""
    makefile = (ROOT / "Makefile").read_text()
    assert "sed -n 's/^torch==//p' constraints.txt" in makefile
    left_out = re.compile(re.search(r"grep -Ev '\^(\(triton[^']*)' constraints", makefile)[1])
    text = script.written("2.13.0", FOUND)
    pins = [x for x in text.splitlines() if left_out.match(x)]
    assert pins == ["cuda-bindings==13.5.0", "triton==3.9.0"]
    assert re.findall(r"^torch==(.*)$", text, flags=re.M) == ["2.13.0"]


def test_torch_itself_is_not_resolved_and_brings_no_cuda(script):
    needs = script.needs_of_torch()
    assert any(need.startswith("sympy") for need in needs)
    assert not [need for need in needs if script.CUDA.match(need) or "extra ==" in need]


def test_it_says_what_changed(script):
    before = script.written("2.13.0", FOUND)
    after = script.written("2.14.1", FOUND.replace("typer==0.29.0", "typer==0.30.0"))
    assert script.changes(before, after) == [
        "- torch==2.13.0",
        "+ torch==2.14.1",
        "- typer==0.29.0",
        "+ typer==0.30.0",
    ]
    assert script.changes(before, before) == ["nothing newer"]

"""The compatibility page says what the tests show, and nothing else."""

import ast

import compatibility_table as table
import pytest
from blocks import ROOT

# what compares bit for bit: functions of the tests and of PyTorch
EXACT = {"check_exact", "check_gradients", "differing", "equal", "same", "agree"}
KNOWN = {feature for features in table.FEATURES.values() for feature in features}


def test_every_mark_names_a_feature_of_the_page():
    assert {mark.feature for mark in table.shown()} <= KNOWN


@pytest.mark.parametrize(
    "mark", [mark for mark in table.shown() if mark.bits], ids=lambda mark: mark.test
)
def test_what_is_called_bit_identical_is_compared_bit_for_bit(mark):
    path, _, name = mark.test.partition("::")
    functions = {
        node.name: node
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    names, waiting = set(), [name]
    while waiting:
        function = functions.pop(waiting.pop(), None)
        if function is not None:
            found = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
            found |= {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
            names |= found
            waiting += found & functions.keys()
    assert names & EXACT, f"{mark.test} compares nothing bit for bit"


def test_a_feature_without_a_test_is_not_said_to_work(monkeypatch):
    assert f"| tensor parallelism | {table.NOT_TESTED} |" in table.compatibility(ROOT)
    monkeypatch.setattr(table, "shown", lambda: [])
    lines = [line for line in table.compatibility(ROOT).splitlines() if line.count("|") == 5]
    assert len([line for line in lines if table.NOT_TESTED in line]) == len(KNOWN)


def mark(bits=True, gpu=False, needs=None):
    return table.Shown("LoRA", bits, needs, gpu, "tests/test_lora.py::test_lora")


@pytest.mark.parametrize(
    ("marks", "output", "where"),
    [
        ([mark()], "bit-identical", "CPU"),
        ([mark(), mark(gpu=True)], "bit-identical", "CPU, GPU"),
        ([mark(), mark(bits=False)], "within rounding", "CPU"),
        (
            [mark(bits=False), mark(gpu=True)],
            "bit-identical on the GPU, else within rounding",
            "CPU, GPU",
        ),
        ([mark(needs="torchao")], "bit-identical", "CPU, if torchao is installed"),
        ([mark(), mark(needs="torchao")], "bit-identical", "CPU"),
    ],
)
def test_a_line_says_what_its_marks_say(marks, output, where):
    assert table._line("LoRA", "", marks) == f"| LoRA | {output} | {where} |  |"

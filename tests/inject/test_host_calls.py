"""An injected block makes few Python calls. On a GPU without graphs the host is what a small model
waits for, and every check that is added to a site or to a module adds some: a number that creeps up
a call at a time is noticed by nobody but this file. Calls are counted, not timed, because a count
is the same on every machine and under any load."""

import sys

import pytest
import torch

import kernelwright as kw
from kernelwright import models
from kernelwright.fuser import joint_recording
from kernelwright.inject.reuse import program_sites

pytest.importorskip("diffusers")


def count(function):
    """How many functions of Python and of C a call makes."""
    found = 0

    def note(frame, event, value):
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def of_blocks(number):
    made = models.build("ltx-video", tiny=True, dtype=torch.float32)
    config = {k: v for k, v in made.config.items() if not k.startswith("_")}
    return type(made)(**{**config, "num_layers": number}).eval()


@torch.no_grad()
def calls(blocks, monkeypatch, **how):
    """The calls of a forward of LTX-Video with this many blocks, after first sight."""
    model = of_blocks(blocks)
    inputs = models.inputs("ltx-video", tiny=True, dtype=torch.float32)
    kw.inject(model, **how)
    for _ in range(4):
        model(**inputs)
    # a kernel would run here, with other calls than those of its stand-in on the CPU
    with monkeypatch.context() as without:
        without.setattr(program_sites.interpreter, "run", lambda *args: None)
        return count(lambda: model(**inputs))


# calls per block and of everything around the blocks: 808 and 702 with recipes, 330 and 619 without
# (PyTorch 2.13; a few more with 2.11), and some room for other versions of PyTorch and diffusers
@pytest.mark.parametrize(
    ("how", "per_block", "around"), [({}, 820, 715), ({"recipes": False}, 340, 630)]
)
def test_an_injected_block_makes_few_calls(how, per_block, around, monkeypatch):
    few, many = calls(2, monkeypatch, **how), calls(6, monkeypatch, **how)
    block = (many - few) / 4
    assert block <= per_block
    assert few - 2 * block <= around


def test_a_block_that_trains_as_without_injection_costs_no_checks(monkeypatch):
    """With adapters, to look whether a block has changed takes as many calls as its forward."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(joint_recording, "_why_not", lambda node: "no programs in this test")
    inputs = models.inputs("ltx-video", tiny=True, dtype=torch.float32)
    layers = ["to_q", "to_k", "to_v", "to_out.0"]

    def calls_of_a_step(blocks, injected):
        model = of_blocks(blocks).requires_grad_(False)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=layers))
        report = kw.inject(model) if injected else None
        for _ in range(3):
            model(**inputs)[0].square().mean().backward()
        made = count(lambda: model(**inputs)[0].square().mean().backward())
        if report is not None:
            assert any("no programs in this test" in line for line in report.gradients)
        return made

    eager, ours = (calls_of_a_step(3, way) - calls_of_a_step(2, way) for way in (False, True))
    assert ours <= 1.3 * eager

"""The examples run, and show what they say."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"


def loaded(name):
    found = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_a_lora_is_trained_with_the_same_losses_and_weights(capsys):
    pytest.importorskip("peft")
    losses, injected, same = loaded("train_lora").main(steps=4)
    assert injected == losses
    assert len(set(losses)) == 4
    assert same
    assert "DIFFERENT" not in capsys.readouterr().out

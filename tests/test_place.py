"""Choice of device: which GPU counts as idle, and the error if none is."""

import pytest
import torch
from typer.testing import CliRunner

from kernelwright import place
from kernelwright.cli import app as cli
from kernelwright.errors import BadSetting, CannotRun
from kernelwright.gpus import Gpu


def gpu(index, used, busy, processes):
    return Gpu(index, "NVIDIA H200", (9, 0), 143771, used, busy, processes)


BUSY, IDLE, UNKNOWN = gpu(0, 9000, 97, 1), gpu(1, 4, 0, 0), gpu(1, None, None, 0)


@pytest.fixture
def machine(monkeypatch):
    """Pretend that torch and nvidia-smi see these GPUs."""

    def with_gpus(*gpus, visible=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(place, "nvidia_smi", lambda: ("580.1", gpus, None))
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return with_gpus


def test_an_idle_gpu_is_taken(machine):
    machine(BUSY, IDLE)
    assert place.choose_device(None) == torch.device("cuda:1")
    machine(BUSY, IDLE, visible="1")
    assert place.choose_device(None) == torch.device("cuda:0")
    machine(BUSY, UNKNOWN)
    assert place.choose_device(None) == torch.device("cuda:1")


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--tiny", "--output", "unused.gif"],
        ["bench", "video", "--tiny"],
        ["profile", "dit-xl", "--tiny"],
        ["demo"],
    ],
    ids=" ".join,
)
def test_a_line_says_that_no_gpu_is_idle(machine, command):
    machine(BUSY, IDLE, visible="0")
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 1
    assert "no GPU is idle (cuda:0 has 1 processes, 9000 MiB used, 97% busy)" in result.output


def test_a_process_that_is_on_a_gpu_stays_there(machine, monkeypatch):
    """nvidia-smi would count this process as another user of the GPU."""
    machine(BUSY, IDLE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert place.choose_device(None) == torch.device("cuda:0")


def test_the_dtype_is_one_that_the_device_has(monkeypatch):
    cuda, cpu = torch.device("cuda:0"), torch.device("cpu")
    for capability, dtype in (((7, 5), torch.float16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        assert place.choose_dtype(None, cuda) == dtype
    assert place.choose_dtype(None, cpu) == torch.float32
    assert place.choose_dtype("bfloat16", cpu) == torch.bfloat16
    with pytest.raises(BadSetting, match="'int8', expected one of bfloat16"):
        place.choose_dtype("int8", cpu)


def test_without_a_gpu_only_a_tiny_model_goes_to_the_cpu_unasked(machine):
    machine()
    assert place.choose_device(None, tiny=True) == torch.device("cpu")
    with pytest.raises(CannotRun, match="--device cpu"):
        place.choose_device(None)


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--tiny", "--output", f"{__file__}/a.gif"],
        ["bench", "video", "--tiny", "--output", f"{__file__}/a.gif"],
        ["bench", "video", "--tiny", "--out", f"{__file__}/a.json"],
        ["profile", "dit-xl", "--tiny", "--out", f"{__file__}/a.json"],
        ["demo", "--save", f"{__file__}/a.png"],
    ],
    ids=lambda command: " ".join(command[:-1]),
)
def test_a_folder_that_cannot_be_written_is_named_before_a_device_is_looked_for(machine, command):
    machine(BUSY)
    result = CliRunner().invoke(cli, command, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "cannot be written" in result.output
    assert command[-2] in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda", "`kernelwright doctor` says what is missing"),
        ("gpu", "expected cuda, cuda:1 or cpu"),
    ],
)
def test_a_device_that_is_not_there_says_what_to_do(device, says):
    with pytest.raises(BadSetting, match=f"'{device}' cannot be used: .*{says}"):
        place.choose_device(device)

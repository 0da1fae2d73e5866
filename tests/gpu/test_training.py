"""Training on a GPU: gradients with eager's bits, with attention that repeats itself."""

import pytest
import torch
from inject.trained import differing, gradients, preset, twice
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernelwright as kw
from kernelwright import models

pytest.importorskip("diffusers")


@pytest.fixture
def repeatable(monkeypatch):
    """Flash attention, and where a mask excludes it PyTorch's own ops: the backward of the kernel
    that would be taken there adds in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.compatibility("training of all weights", "training of LoRA")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", models.presets())
def test_gradients_are_eagers(repeatable, name, dtype, lora):
    eager, ours = twice(preset(name, lora, dtype).cuda())
    inputs = models.inputs(name, tiny=True, dtype=dtype, device="cuda")
    expected = gradients(eager, inputs)
    assert differing(gradients(eager, inputs), expected) == []
    report = kw.inject(ours)
    for _ in range(3):
        assert differing(gradients(ours, inputs), expected) == []
    assert not any("PyTorch's:" in line for line in report.gradients), report.gradients


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_no_more_memory_than_eager(lora):
    eager = preset("ltx-video", lora, torch.bfloat16).cuda()
    inputs = models.inputs("ltx-video", tiny=True, dtype=torch.bfloat16, device="cuda")

    def peak(trained):
        for _ in range(2):
            gradients(trained, inputs)
        trained.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(trained, inputs)
        return torch.cuda.max_memory_allocated() - before

    usual = peak(eager)
    with kw.injected(eager):
        assert peak(eager) <= usual

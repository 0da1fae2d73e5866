"""Attention that is told a window, by PyTorch's flash attention: what a mask gives, in any size."""

import pytest
import torch
from attended import hold, tensors
from inject.harness import run, same

import kernelwright as kw
from kernelwright import models
from kernelwright.ops.attention import window

HALVES = [torch.float16, torch.bfloat16]
pytestmark = pytest.mark.gpu


def masked(tokens, width):
    place = torch.arange(tokens, device="cuda")
    return window.seen(place, place, width)


@pytest.mark.parametrize("width", [1, 17, 640, 1023])
@pytest.mark.parametrize("tokens", [77, 1024, 1500])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_window_gives_what_its_mask_gives(dtype, head_dim, heads, shared, tokens, width):
    args = tensors(2, heads, shared, tokens, tokens, head_dim, dtype=dtype, device="cuda")
    assert window.why_not(*args) is None
    hold(window.attend(*args, None, width), *args, masked(tokens, width), eager="math")


def test_rows_at_odd_places_are_left_to_other_kernels():
    x = torch.randn(1, 2, 128, 72, device="cuda", dtype=torch.bfloat16)[..., 1:65]
    assert window.attend(x, x, x, None, 5) is None


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
@torch.no_grad()
def test_a_language_model_is_told_its_windows(graphs, monkeypatch):
    how = {"dtype": torch.bfloat16, "device": "cuda"}
    model = models.build("gemma-3-12b", layers=2, **how)
    inputs = models.inputs("gemma-3-12b", tokens=1500, **how)
    calls, own = [], window.flash
    monkeypatch.setattr(window, "flash", lambda *given: calls.append(given[-1]) or own(*given))
    with kw.injected(model, numerics="fused", graphs=graphs) as report:
        first = run(model, inputs)
        # one call with a window of its own tries the kernel
        assert set(calls) - {window.WINDOW} == {model.config.get_text_config().sliding_window}
        assert all(same(run(model, inputs), first) for _ in range(4))
        if graphs:
            (of_model,) = report.graphs
            assert of_model.captured == 1, of_model.reasons
            (known,) = of_model._models.values()
            assert all(graph._reads is None for graph in known.graphs.values())
    assert not report.problems

"""Graphs in a pipeline: the denoiser and the encoders of the prompt have them, the VAE has none."""

import pytest
import torch
from torch import nn
from transformers.utils import import_utils

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.graphs import graphs as graphs_module
from kernelwright.inject.graphs.graphs import capturing
from kernelwright.inject.identify.targets import Part
from kernelwright.inject.runtime import forwards

from .harness import frames
from .stand_in import Again, CpuGraphs, alignment_of_new_memory  # noqa: F401

PROMPTS = ("a boat on a lake", "a lighthouse", "snow")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(
        import_utils, "is_cuda_stream_capturing", lambda: capturing() or Again.replaying
    )
    monkeypatch.setattr(graphs_module, "Graphs", CpuGraphs)


@pytest.fixture(scope="module")
def pipe():
    made = models.ltx_pipeline(tiny=True, dtype=torch.float32)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(autouse=True)
def restored(pipe):
    yield
    kw.restore(pipe)


def latents(pipe, prompt):
    return frames(pipe, prompt, output_type="latent")


def by_name(report):
    return {graphs.name: graphs for graphs in report.graphs}


def test_the_text_encoder_is_replayed_with_the_bits_of_eager(pipe):
    expected = [latents(pipe, prompt) for prompt in PROMPTS]
    report = kw.inject(pipe, graphs=True)
    for prompt, wanted in zip(PROMPTS, expected, strict=True):
        assert torch.equal(latents(pipe, prompt), wanted)
    found = by_name(report)
    assert set(found) == {"text_encoder", "transformer"}
    # two prompts per video: the second is captured, four follow
    assert found["text_encoder"].counts == (1, 5)
    assert report.to_dict()["graphs"] == ["text_encoder: 1 graph", "transformer: 1 graph"]
    assert "text_encoder: 1 graph" in str(report)


def test_restore_takes_the_graphs_off(pipe):
    kw.inject(pipe, graphs=True)
    assert forwards.installed(pipe.text_encoder) is not None
    kw.restore(pipe)
    assert not any(forwards.installed(m) for m in pipe.text_encoder.modules())
    assert "forward" not in vars(pipe.text_encoder)


def test_a_component_that_is_left_out_has_no_graph(pipe):
    for how in ({"skip": "text_encoder"}, {"only": "transformer"}):
        assert set(by_name(kw.inject(pipe, graphs=True, **how))) == {"transformer"}
    assert not kw.inject(pipe).graphs


def test_an_encoder_that_is_offloaded_runs_without_a_graph(pipe):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected = pipe.text_encoder(ids)[0]
        report = kw.inject(pipe, graphs=True)
        cpu_offload(pipe.text_encoder, torch.device("cpu"))
        try:
            for _ in range(3):
                assert torch.equal(pipe.text_encoder(ids)[0], expected)
        finally:
            remove_hook_from_submodules(pipe.text_encoder)
    graphs = by_name(report)["text_encoder"]
    assert graphs.captured == 0
    assert any("AlignDevicesHook" in reason for reason in graphs.reasons), graphs.reasons


@torch.no_grad()
def test_an_encoder_with_a_mask_and_layers_in_float32_is_replayed():
    encoder = models.ltx_pipeline(tiny=True, dtype=torch.bfloat16).text_encoder
    for name, module in encoder.named_modules():
        if name.endswith(".wo"):
            module.float()
    masks = [torch.arange(16).lt(length)[None].long() for length in (9, 5, 12, 7)]
    ids = [torch.randint(3, 300, (1, 16)) for _ in masks]
    expected = [encoder(i, m)[0] for i, m in zip(ids, masks, strict=True)]
    report = kw.inject(encoder, graphs=True)
    results = [encoder(i, m)[0] for i, m in zip(ids, masks, strict=True)]
    assert all(map(torch.equal, results, expected))
    assert report.graphs[0].counts == (1, 3)
    assert report.graphs[0].reasons == {}


def test_only_models_of_transformers_count_as_encoders(pipe):
    assert Part("text_encoder_2", pipe.text_encoder).encodes
    assert not Part("vae", pipe.vae).encodes
    assert not Part("safety_checker", nn.Linear(2, 2)).encodes

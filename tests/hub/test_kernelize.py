"""`kernelize` with the Hub package: a model then computes what the injected one does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from inject.harness import run, same
from inject.language import model_of, words
from torch import nn

import kernelwright as kw
from kernelwright import hub
from kernelwright.hub import layer_mapping, layers
from kernelwright.models import presets

kernels = pytest.importorskip("kernels")
INFERENCE = kernels.Mode.INFERENCE
COMPILED = kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE


def llama():
    return model_of("Llama", num_hidden_layers=1), words()


def gemma():
    return model_of("Gemma", num_hidden_layers=1), words()


def ltx():
    preset = presets()["ltx-video"]
    model = preset.build(tiny=True, dtype=torch.float32)
    del model.transformer_blocks[1:]
    return model, preset.inputs(tiny=True, dtype=torch.float32)


def flux():
    preset = presets()["flux-dev"]
    model = preset.build(tiny=True, dtype=torch.float32)
    del model.transformer_blocks[1:], model.single_transformer_blocks[1:]
    return model, preset.inputs(tiny=True, dtype=torch.float32)


def kernelized(model, package, mode):
    return hub.kernelize(copy.deepcopy(model), mode=mode, package=package, device="cpu")


@pytest.mark.parametrize("mode", [INFERENCE, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("make", "classes"),
    [
        (llama, {"LlamaRMSNorm", "LlamaMLP"}),
        (gemma, {"GemmaMLP", "GELUTanh"}),
        (
            ltx,
            {
                "LTXVideoTransformerBlock",
                "LTXAttention",
                "FeedForward",
                "RMSNorm",
                "LayerNorm",
            },
        ),
    ],
    ids=["llama", "gemma", "ltx"],
)
def test_a_kernelized_model_equals_the_injected_one(package, replaced, make, classes, mode):
    model, inputs = make()
    with kw.injected(model, numerics="fused"):
        expected = run(model, inputs)
    model = kernelized(model, package, mode)
    assert replaced(model) == classes
    if mode == COMPILED:
        model = torch.compile(model, fullgraph=True, backend="eager")
    assert same(run(model, inputs), expected)


@pytest.mark.parametrize("mode", [INFERENCE, COMPILED], ids=["eager", "compiled"])
def test_the_blocks_of_flux_compute_what_they_did(package, replaced, mode):
    """Not bit for bit what injection does, which also splits a GEMM."""
    model, inputs = flux()
    expected = run(model, inputs)
    ours = kernelized(model, package, mode)
    blocks = {"FluxTransformerBlock", "FluxSingleTransformerBlock", "FluxAttention"}
    assert blocks <= replaced(ours)
    runs = torch.compile(ours, fullgraph=True, backend="eager") if mode == COMPILED else ours
    torch.testing.assert_close(run(runs, inputs), expected, rtol=1e-5, atol=1e-5)
    if mode == INFERENCE:
        for each in (model, ours):
            each(**inputs)[0].square().mean().backward()
        for own, new in zip(model.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(own.grad, new.grad, rtol=1e-4, atol=1e-6)


def test_what_flux_attention_cannot_fuse_its_own_forward_computes(package):
    model, _ = flux()
    attn = model.transformer_blocks[0].attn
    rows, text = (torch.randn(1, n, attn.query_dim) for n in (4, 3))
    own = attn(rows, text)
    seen = []
    attn.norm_q.register_forward_hook(lambda *a: seen.append(1))
    got = layers.FluxAttention.forward(attn, rows, text)
    assert seen
    assert all(torch.equal(g, o) for g, o in zip(got, own, strict=True))


def test_classes_are_named_only_while_kernelize_runs(package):
    model, _ = ltx()
    kinds = {type(m) for m in model.modules()}
    with layer_mapping.named(model) as given:
        assert "diffusers.models.transformers.transformer_ltx.LTXVideoTransformerBlock" in given
    assert not any("kernel_layer_name" in vars(kind) for kind in kinds)


def test_a_norm_that_is_not_what_it_is_named_keeps_its_own_forward(package, replaced):
    class ZeroCentredRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(8)), 1e-6

        def forward(self, hidden_states):
            return F.rms_norm(hidden_states, (8,), 1 + self.weight, self.variance_epsilon)

    kernels.replace_kernel_forward_from_hub(ZeroCentredRMSNorm, "RMSNorm")
    own = vars(ZeroCentredRMSNorm)["kernel_condition"]
    assert replaced(kernelized(nn.Sequential(ZeroCentredRMSNorm()), package, INFERENCE)) == set()
    assert vars(ZeroCentredRMSNorm)["kernel_condition"] is own


def test_a_class_whose_code_has_changed_keeps_its_own_forward(package, replaced, monkeypatch):
    from diffusers.models.transformers import transformer_ltx

    model, _ = ltx()

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        image_rotary_emb=None,
        encoder_attention_mask=None,
    ):
        return 2 * hidden_states

    monkeypatch.setattr(transformer_ltx.LTXVideoTransformerBlock, "forward", forward)
    try:
        assert "LTXVideoTransformerBlock" not in replaced(kernelized(model, package, INFERENCE))
    finally:
        monkeypatch.undo()


def test_training_mode_has_the_gradients_of_eager(package):
    model, inputs = llama()
    losses = []
    trained = kernelized(model.train(), package, kernels.Mode.TRAINING)
    for each in (model, trained):
        loss = each(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1])
    pairs = zip(model.parameters(), trained.parameters(), strict=True)
    for eager, ours in pairs:
        torch.testing.assert_close(eager.grad, ours.grad, rtol=1e-4, atol=1e-6)


def test_a_hook_on_a_norm_is_still_called():
    model, inputs = ltx()
    block = model.transformer_blocks[0]
    seen = []
    block.norm2.register_forward_hook(lambda *a: seen.append(1))
    kernelized_block = layers.LTXVideoTransformerBlock.forward
    block.forward = kernelized_block.__get__(block)
    run(model, inputs)
    assert seen

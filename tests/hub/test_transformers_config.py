"""The package through transformers' KernelConfig: what has a name there, and nothing wrong."""

import copy

import pytest
import torch
from inject.harness import run
from inject.language import model_of, words
from torch import nn

from kernelwright import hub

kernels = pytest.importorskip("kernels")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """It refuses local kernels on a CPU, so the device is called by another name here."""
    from transformers.utils import kernel_config

    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", ["cpu"])


def tiny(family):
    return model_of(family, torch.bfloat16, num_hidden_layers=1)


def kernelized(model, package):
    """By `kernelize`, but for the feed-forwards, which have no name in transformers."""
    model = copy.deepcopy(model)
    hub.kernelize(model, mode=kernels.Mode.INFERENCE, package=package, device="cpu")
    for module in model.modules():
        if type(module).__name__.endswith("MLP"):
            del module.forward
    return model


SERVED = {"Llama": {"LlamaRMSNorm"}, "Gemma": {"GELUTanh"}}


def test_one_config_serves_models_of_other_names_with_what_kernelize_gives(package, replaced):
    config = hub.kernel_config(package)
    models = {family: tiny(family) for family in SERVED}
    for family, model in models.items():
        eager = run(model, words()).logits
        expected = run(kernelized(model, package), words()).logits
        model.set_use_kernels(True, config)
        assert replaced(model) == SERVED[family]
        assert torch.equal(run(model, words()).logits, expected)
        # GELU has the bits of eager here; the norm rounds once where eager rounds twice
        assert torch.equal(eager, expected) == (family == "Gemma")
    for family, model in models.items():
        assert replaced(model.train()) == replaced(model.eval()) == SERVED[family]


def test_from_pretrained_takes_it(package, replaced, tmp_path):
    model = tiny("Llama")
    model.save_pretrained(tmp_path)
    plain, loaded = (
        type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, **kernels).eval()
        for kernels in ({}, {"use_kernels": True, "kernel_config": hub.kernel_config(package)})
    )
    assert replaced(loaded) == {"LlamaRMSNorm"}
    expected = run(kernelized(plain, package), words()).logits
    assert torch.equal(run(loaded, words()).logits, expected)


def test_rotary_embedding_is_taken_where_it_is_asked_for(package, kernel):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = model_of("Llama", num_hidden_layers=1)
    ours, forwards, logits = kernel.layers.RotaryPosEmb.forward, [], []
    try:
        for rotary in (False, True):
            model.set_use_kernels(True, hub.kernel_config(package, rotary=rotary))
            forwards.append(apply_rotary_pos_emb.forward.__func__)
            logits.append(run(model, words()).logits)
    finally:
        vars(apply_rotary_pos_emb).pop("forward", None)
    assert [f is ours for f in forwards] == [False, True]
    torch.testing.assert_close(*logits)


def test_a_layer_that_is_not_what_it_is_named_stays_as_it_is_and_is_told(package):
    class ZeroCentredRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(8)), 1e-6

        def forward(self, hidden_states):
            scale = (hidden_states.square().mean(-1, True) + self.variance_epsilon).rsqrt()
            return hidden_states * scale * (1 + self.weight)

    kernels.replace_kernel_forward_from_hub(ZeroCentredRMSNorm, "RMSNorm")
    config = hub.kernel_config(package)
    with (
        pytest.warns(UserWarning, match=r"RMSNorm stays as it is: .* ZeroCentredRMSNorm"),
        pytest.raises(ValueError, match=r"no layer of the package serves Sequential.* RMSNorm;"),
    ):
        config.sanitize_kernel_mapping(nn.Sequential(ZeroCentredRMSNorm()))

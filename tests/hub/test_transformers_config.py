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
    config = hub.kernel_config(package, numerics="fused")
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
    fused = hub.kernel_config(package, numerics="fused")
    plain, loaded = (
        type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, **kernels).eval()
        for kernels in ({}, {"use_kernels": True, "kernel_config": fused})
    )
    assert replaced(loaded) == {"LlamaRMSNorm"}
    expected = run(kernelized(plain, package), words()).logits
    assert torch.equal(run(loaded, words()).logits, expected)


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_by_default_logits_and_generated_tokens_have_the_bits_of_eager(package, replaced, family):
    model = tiny(family)
    eager, tokens = run(model, words()).logits, model.generate(**words(), max_new_tokens=4)
    model.set_use_kernels(True, hub.kernel_config(package))
    assert replaced(model) == SERVED[family]
    assert torch.equal(run(model, words()).logits, eager)
    assert torch.equal(model.generate(**words(), max_new_tokens=4), tokens)


def test_a_gelu_in_another_form_than_torchs_keeps_its_own_bits(package):
    from transformers.activations import GELUActivation

    model = nn.Sequential(GELUActivation(use_gelu_python=True), GELUActivation())
    with (
        pytest.warns(UserWarning, match="GeLU stays as it is"),
        pytest.raises(ValueError, match="no layer of the package serves"),
    ):
        hub.kernel_config(package).fitting(model)
    assert set(hub.kernel_config(package, numerics="fused").fitting(model)) == {"GeLU"}


def test_an_exact_layer_whose_bits_differ_keeps_the_forward_of_its_module(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from kernelwright.hub.layers import ExactRMSNorm, exact

    norm, x = LlamaRMSNorm(8).bfloat16(), torch.randn(3, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(exact, "_equal", {})
    with monkeypatch.context() as patched:
        patched.setattr(exact, "rmsnorm", lambda x, *args, **how: x)
        with pytest.warns(UserWarning, match=r"LlamaRMSNorm of shape \(3, 8\) keeps its own"):
            assert torch.equal(ExactRMSNorm.forward(norm, x), norm(x))
        assert torch.equal(ExactRMSNorm.forward(norm, x), norm(x))
    mixed = LlamaRMSNorm(8)
    assert torch.equal(ExactRMSNorm.forward(mixed, x), mixed(x))


@pytest.fixture
def fusions_undone():
    """transformers keeps fused classes, and how their weights are converted, for the process."""
    from transformers import conversion_mapping, monkey_patching

    known = conversion_mapping.get_checkpoint_conversion_mapping("llama")
    yield
    monkey_patching.clear_patch_mapping()
    cache = conversion_mapping._checkpoint_conversion_mapping_cache
    conversion_mapping.USER_REGISTERED_MAPPINGS.discard("llama")
    if known is None:
        cache.pop("llama")
    else:
        cache["llama"] = known


def test_a_norm_and_its_feed_forward_become_one_module(package, tmp_path, fusions_undone):
    model = model_of("Llama")
    model.save_pretrained(tmp_path / "plain")
    config = hub.kernel_config(package, numerics="fused", fused_mlps="model.layers.*")
    fused = type(model).from_pretrained(tmp_path / "plain", use_kernels=True, kernel_config=config)
    for ours, own in zip(fused.model.layers, model.model.layers, strict=True):
        norm, mlp = ours.post_attention_layernorm, own.mlp
        assert type(ours.mlp) is nn.Identity
        assert type(norm).__name__ == "RMSNormSwiGLUMLPLayout"
        joined = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        assert torch.equal(norm.gate_up_proj.weight, joined)
    assert "forward" in vars(norm)
    torch.testing.assert_close(run(fused, words()).logits, run(model, words()).logits)
    fused.save_pretrained(tmp_path / "again")
    names = [set(safe_keys(tmp_path / folder)) for folder in ("plain", "again")]
    assert names[0] == names[1]


def safe_keys(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def test_a_package_on_the_hub_is_named_with_its_version_and_trusted_only_on_request():
    for trust in (False, True):
        config = hub.kernel_config(trust_remote_code=trust)
        place, how = config.fitting(tiny("Llama"))["RMSNorm"]
        assert place == "kernelwright/ltx-kernels:ExactRMSNorm"
        assert how == {"version": 0, "trust_remote_code": trust}
        assert not config.use_local_kernel


def test_what_rounds_otherwise_is_not_exact(package):
    for more in ({"rotary": True}, {"fused_mlps": "model.layers.*"}):
        with pytest.raises(ValueError, match="need numerics='fused'"):
            hub.kernel_config(package, **more)
    with pytest.raises(ValueError, match="numerics is 'fast', expected one of"):
        hub.kernel_config(package, numerics="fast")


def test_rotary_embedding_is_taken_where_it_is_asked_for(package, kernel):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = model_of("Llama", num_hidden_layers=1)
    ours, forwards, logits = kernel.layers.RotaryPosEmb.forward, [], []
    try:
        for rotary in (False, True):
            model.set_use_kernels(True, hub.kernel_config(package, numerics="fused", rotary=rotary))
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

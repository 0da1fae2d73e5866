"""The attention that UNets and PixArt share: the same bits with every option it has."""

import pytest
import torch

import kernelwright as kw
from inject.harness import check_exact
from kernelwright import models


def attention(**options):
    from diffusers.models.attention_processor import Attention

    torch.manual_seed(0)
    return Attention(query_dim=32, heads=2, dim_head=16, bias=True, **options).eval()


OPTIONS = {
    "plain": {},
    "rescaled": {"rescale_output_factor": 1.5},
    "residual": {"residual_connection": True},
    "qk-norm": {"qk_norm": "layer_norm"},
    "cross-norm": {"cross_attention_dim": 24, "cross_attention_norm": "layer_norm"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_every_option_keeps_the_bits(options, masked):
    width = options.get("cross_attention_dim", 32)
    inputs = {"hidden_states": torch.randn(2, 6, 32)}
    if "cross_attention_dim" in options:
        inputs["encoder_hidden_states"] = torch.randn(2, 5, width)
    if masked:
        tokens = 5 if "encoder_hidden_states" in inputs else 6
        inputs["attention_mask"] = torch.where(torch.arange(tokens) < 3, 0.0, -1e4).expand(2, 1, -1)
    check_exact(attention(**options), inputs)


def test_one_that_normalises_over_channels_is_left_alone():
    report = kw.inspect(attention(norm_num_groups=4))
    assert report.replaced == 0
    assert "normalises its input over channels" in str(report)


def test_pixels_go_to_the_original():
    check_exact(attention(), {"hidden_states": torch.randn(2, 32, 3, 4)})


def test_a_division_by_one_is_left_out():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Divisions(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten.div.Tensor
            return function(*args, **(kwargs or {}))

    model = models.build("pixart", tiny=True, dtype=torch.float32)
    inputs = models.inputs("pixart", tiny=True, dtype=torch.float32)

    def divisions():
        with torch.no_grad(), Divisions() as seen:
            model(**inputs)
        return seen.count

    before = divisions()
    with kw.injected(model), torch.no_grad():
        model(**inputs)
        after = divisions()
    assert before - after == 2 * len(model.transformer_blocks)

"""Attention that keeps all scores in memory has the bits of PyTorch's math kernel."""

import pytest
import torch
import torch.nn.functional as F
from inject.harness import check_exact, fused_sites

from kernelwright import models
from kernelwright.inject.fusions import all_scores

KEYS = [2049, 2560, 4096, 5001, 9216]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", KEYS)
def test_attention_of_shared_keys_has_eagers_bits(keys, dtype):
    generator = torch.Generator("cuda").manual_seed(keys)
    how = {"generator": generator, "device": "cuda"}
    query = torch.randn(2, 5, 300, 64, **how).to(dtype)
    key, value = torch.randn(2, 2, 1, keys, 64, **how).to(dtype)
    seen = torch.rand(2, 1, 300, keys, **how) > 0.5
    seen[0, 0, 7] = False
    for mask in (seen, seen[:1, :, :1], torch.randn(2, 5, 300, keys, **how).to(dtype)):
        assert all_scores.why_not(query, key, value, mask) is None
        expected = F.scaled_dot_product_attention(query, key, value, mask)
        assert torch.equal(all_scores.attend(query, key, value, mask), expected)


@pytest.mark.parametrize("keys", KEYS)
def test_numbers_that_are_none_are_as_in_eager(keys):
    scores = torch.randn(1, 1, 64, keys, device="cuda")
    seen = torch.rand(1, 1, 64, keys, device="cuda") > 0.5
    scores[0, 0, 0, 3], scores[0, 0, 1, 4] = torch.nan, torch.inf
    scores[0, 0, 2], seen[0, 0, 3] = -torch.inf, False
    numbers = torch.where(seen, 0.0, -torch.inf)
    expected = torch.ops.aten._safe_softmax(scores + numbers, -1)
    got = all_scores.probabilities(scores, seen)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_falcon_runs_by_it():
    model = models.build("falcon-7b", device="cuda", layers=2).requires_grad_(False)
    report = check_exact(model, models.inputs("falcon-7b", device="cuda"))
    assert fused_sites(report)["attention with all scores"] == 2

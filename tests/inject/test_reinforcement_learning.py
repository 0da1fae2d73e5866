"""Log-probabilities of an exact rollout are those of the training forward, and eager's own."""

import copy

import pytest
import torch

import kernelwright as kw
from kernelwright import models

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT, NEW = 6, 5


def log_probabilities(model, sequences):
    logits = model(sequences, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rollout_and_training_agree_to_the_bit_over_updates(dtype):
    policy = models.build("llama-3-8b", tiny=True, dtype=dtype)
    report = kw.inject(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    prompt = torch.randint(256, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    before = None
    for _ in range(2):
        with torch.no_grad():
            sequences = policy.generate(
                prompt, min_new_tokens=NEW, max_new_tokens=NEW, do_sample=True, pad_token_id=0
            )
            rollout = log_probabilities(policy, sequences)
        training = log_probabilities(policy, sequences)
        assert training.requires_grad
        assert torch.equal(training, rollout)
        eager = copy.deepcopy(policy)
        kw.restore(eager)
        with torch.no_grad():
            assert torch.equal(log_probabilities(eager, sequences), rollout)
            if before is not None:  # the update did change what the policy says
                assert not torch.equal(log_probabilities(before, sequences), rollout)
        before = eager
        ratio = (training - rollout).exp()
        assert (ratio == 1).all()
        advantage = torch.tensor([[1.0], [-1.0]])
        optimizer.zero_grad()
        (-(ratio * advantage)[:, PROMPT - 1 :].mean()).backward()
        assert all(p.grad is not None for p in policy.parameters())
        optimizer.step()
    assert report.replaced > 0

"""What may happen between the steps of a training, to an eager model and to an injected copy of it:
both end with the same gradients, on the CPU and on a GPU. `batch(seed)` makes their inputs."""

from functools import partial

import pytest
import torch
from torch import nn

import kernelwright as kw
from inject.trained import differing, gradients


def grads(trained):
    return {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}


def loss_of(trained, inputs):
    return trained(**inputs).float().square().mean()


def same(eager, ours, inputs, **how):
    expected = gradients(eager, inputs, **how)
    assert differing(gradients(ours, inputs, **how), expected) == []


def same_gradients(eager, ours, run):
    """`run` computes the gradients of a model."""
    for m in (eager, ours):
        m.zero_grad(set_to_none=True)
        run(m)
    assert differing(grads(ours), grads(eager)) == []


def later_steps_change_nothing(eager, ours, batch):
    found = [[], []]
    for kept, m in zip(found, (eager, ours), strict=True):
        m.last = nn.Identity()  # the last block's result is that of the model
        for seed in range(4):
            m.zero_grad(set_to_none=True)
            result = m(**batch(seed))
            result.square().mean().backward()
            kept += [result.detach(), *grads(m).values()]
    assert all(map(torch.equal, *found))


def gradients_accumulate(eager, ours, batch, to_none):
    for _ in range(2):
        for m in (eager, ours):
            m.zero_grad(set_to_none=to_none)
            for seed in range(3):
                loss_of(m, batch(seed)).backward()
        assert differing(grads(ours), grads(eager)) == []


ORDERS = {"as run": (0, 1), "reversed": (1, 0), "summed": None}


def two_forwards_come_before_their_backwards(eager, ours, batch, order):
    def run(m):
        losses = [loss_of(m, batch(seed)) for seed in (5, 6)]
        if ORDERS[order] is None:
            sum(losses).backward()
        else:
            for i in ORDERS[order]:
                losses[i].backward()

    for _ in range(2):
        same_gradients(eager, ours, run)


def a_graph_is_retained(eager, ours, batch):
    def run(m):
        loss = loss_of(m, batch(0))
        loss.backward(retain_graph=True)
        loss_of(m, batch(3)).backward()
        loss.backward()

    same_gradients(eager, ours, run)


def the_first_block_is_done_before_the_second(eager, ours, batch):
    """Values that the second block still needs may lie in memory that the graph of the first one
    writes to."""
    found = []
    for m in (eager, ours):
        kept = []
        hook = m.blocks[0].register_forward_hook(lambda *given, kept=kept: kept.append(given[-1]))
        loss = loss_of(m, batch(0))
        hook.remove()
        weights = [list(block.parameters()) for block in m.blocks]
        both = sum(t.square().sum() for t in kept.pop())
        first = torch.autograd.grad(both, weights[0])
        other = loss_of(m, batch(7))
        second = torch.autograd.grad(loss, weights[1])
        third = torch.autograd.grad(other, weights[0])
        found.append([*first, *second, *third])
    assert all(map(torch.equal, *found))


def a_weight_is_moved(eager, ours, batch):
    weight = ours.blocks[0].up.weight
    weight.data = weight.data.clone()
    for seed in range(4):
        same(eager, ours, batch(seed))


def weights_are_moved_before_the_backward(eager, ours, batch):
    def run(m):
        loss = loss_of(m, batch(0))
        weight = m.blocks[1].up.weight
        weight.data = weight.data.clone()
        loss.backward()

    same_gradients(eager, ours, run)


def inference_comes_between(eager, ours, batch, times):
    results = []

    def run(m, seed):
        loss = loss_of(m, batch(seed))
        m.eval()
        with torch.no_grad():
            results.append(m(**batch(8)))
        m.train()
        loss.backward()

    for seed in range(times):
        same_gradients(eager, ours, partial(run, seed=seed))
    assert all(map(torch.equal, results[::2], results[1::2]))


def a_loss_is_scaled_and_gradients_are_clipped(eager, ours, batch, device):
    for m in (eager, ours):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=128.0)
        for seed in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(m, batch(seed))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert differing(ours.state_dict(), eager.state_dict()) == []


class Stop(Exception):
    pass


def stop(*given):
    raise Stop


def an_exception_is_raised(eager, ours, batch, where):
    if where == "forward":
        hook = ours.blocks[1].register_forward_pre_hook(stop)
    else:
        hook = ours.blocks[0].up.weight.register_hook(stop)
    with pytest.raises(Stop):
        loss_of(ours, batch(0)).backward()
    hook.remove()
    for seed in range(3):
        same(eager, ours, batch(seed))


def it_is_restored_before_the_backward(eager, ours, batch):
    def run(m):
        loss = loss_of(m, batch(0))
        kw.restore(m)
        loss.backward()

    same_gradients(eager, ours, run)
    same(eager, ours, batch(0))

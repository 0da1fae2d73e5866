"""What a block computes ahead is taken by the next alone, and only beside the same tensors."""

import threading

import pytest
import torch
from torch import nn

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.runtime import work_ahead

from .harness import run, same
from .mutations.parts import Writes


@pytest.fixture
def blocks():
    made = [nn.Sequential(nn.Identity()) for _ in range(3)]
    with torch.no_grad(), work_ahead.chain(made, "key"):
        yield made


def test_blocks_follow_each_other_in_order(blocks):
    first, second, last = blocks
    assert work_ahead.following(first) is second
    assert work_ahead.following(second) is last
    assert work_ahead.following(last) is None
    assert work_ahead.following(nn.Identity()) is None


def test_the_blocks_that_run_are_known_by_id(blocks):
    assert work_ahead.running() == {id(b): b for b in blocks}


def test_the_signature_of_the_model_is_that_of_its_blocks(blocks):
    assert work_ahead.shared_key(blocks[0]) == "key"
    assert work_ahead.shared_key(blocks[-1]) == "key"
    assert work_ahead.shared_key(nn.Identity()) is None


def test_nothing_runs_outside():
    block = nn.Identity()
    assert work_ahead.running() == {}
    assert work_ahead.shared_key(block) is None
    with torch.no_grad():
        assert work_ahead.following(block) is None


def test_nothing_is_done_ahead_where_gradients_are_recorded(blocks):
    with torch.enable_grad():
        assert work_ahead.following(blocks[0]) is None


def test_a_chain_inside_another_ends_with_it(blocks):
    x = torch.ones(2)
    work_ahead.offer(blocks[1], (x,), "outer")
    inner = [nn.Identity(), nn.Identity()]
    with work_ahead.chain(inner, "inner"):
        assert work_ahead.following(inner[0]) is inner[1]
        assert work_ahead.shared_key(inner[0]) == "inner"
        assert work_ahead.following(blocks[0]) is None
        assert work_ahead.take(blocks[1], x) is None
    assert work_ahead.following(blocks[0]) is blocks[1]
    assert work_ahead.shared_key(blocks[0]) == "key"
    assert work_ahead.take(blocks[1], x) == "outer"


def test_a_hook_on_either_block_or_inside_the_next_keeps_them_apart(blocks):
    first, second, _ = blocks
    for module in (first, second, second[0]):
        handle = module.register_forward_hook(lambda *args: None)
        assert work_ahead.following(first) is None
        handle.remove()
        assert work_ahead.following(first) is second
    second[0].below = nn.Sequential(nn.Identity())
    handle = second[0].below[0].register_forward_hook(lambda *args: None)
    assert work_ahead.following(first) is None
    handle.remove()
    second[0].below[0].forward = lambda x: x
    assert work_ahead.following(first) is None
    del second[0].below
    # what is inside the first has run by then
    handle = first[0].register_forward_hook(lambda *args: None)
    assert work_ahead.following(first) is second
    handle.remove()


def test_what_was_refused_is_not_done_ahead_until_allowed(blocks):
    first, second, last = blocks
    work_ahead.refuse(second)
    assert work_ahead.following(first) is None
    assert work_ahead.following(second) is last
    work_ahead.allow(second)
    assert work_ahead.following(first) is second


def test_an_offer_is_taken_once(blocks):
    x = torch.ones(2)
    work_ahead.offer(blocks[1], (x,), "value")
    assert work_ahead.is_offered(blocks[1])
    assert not work_ahead.is_offered(blocks[2])
    assert work_ahead.take(blocks[1], x) == "value"
    assert not work_ahead.is_offered(blocks[1])
    assert work_ahead.take(blocks[1], x) is None


def test_an_offer_is_for_one_module(blocks):
    x = torch.ones(2)
    work_ahead.offer(blocks[1], (x,), "value")
    assert work_ahead.take(blocks[2], x) is None
    # and it is gone: it was for the block that should have run
    assert work_ahead.take(blocks[1], x) is None


def test_an_offer_is_for_the_very_same_tensors(blocks):
    x, y = torch.ones(2), torch.ones(2)
    for given in ((y,), (x, x), (), (x.view(2),)):
        work_ahead.offer(blocks[1], (x,), "value")
        assert work_ahead.take(blocks[1], *given) is None
    work_ahead.offer(blocks[1], (x, y), "value")
    assert work_ahead.take(blocks[1], y, x) is None
    work_ahead.offer(blocks[1], (x, y), "value")
    assert work_ahead.take(blocks[1], x, y) == "value"


@pytest.mark.parametrize("which", [0, 1])
def test_an_offer_ends_when_a_tensor_is_changed(blocks, which):
    tensors = torch.ones(2), torch.ones(2)
    work_ahead.offer(blocks[1], tensors, "value")
    tensors[which].add_(1)
    assert work_ahead.take(blocks[1], *tensors) is None


def test_inference_tensors_have_no_version(blocks):
    with torch.inference_mode():
        x = torch.ones(2)
        work_ahead.offer(blocks[1], (x,), "value")
        assert work_ahead.take(blocks[1], x) == "value"


def test_an_offer_can_be_forgotten(blocks):
    x = torch.ones(2)
    work_ahead.offer(blocks[1], (x,), "value")
    work_ahead.forget()
    assert not work_ahead.is_offered(blocks[1])
    assert work_ahead.take(blocks[1], x) is None


def test_threads_have_chains_of_their_own(blocks):
    seen = []

    def look():
        seen.append((work_ahead.running(), work_ahead.shared_key(blocks[0])))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [({}, None)]


def test_who_offers_is_told_if_nobody_takes_it(blocks):
    x, y = torch.ones(2), torch.ones(2)

    def missed(then):
        """How often the one who offered was told, after the offer and `then`."""
        told = []
        with work_ahead.chain(blocks, "key"):
            work_ahead.offer(blocks[1], (x,), "value", lambda: told.append(1))
            then()
        return len(told)

    assert missed(lambda: None) == 1  # the forward ends
    assert missed(lambda: work_ahead.take(blocks[1], x)) == 0
    assert missed(lambda: work_ahead.take(blocks[1], y)) == 1
    assert missed(lambda: work_ahead.take(blocks[2], x)) == 1
    assert missed(lambda: work_ahead.offer(blocks[2], (x,), "another")) == 1
    assert missed(lambda: work_ahead.offered(blocks[1])) == 1  # to look is not to take
    assert missed(lambda: work_ahead.offered(blocks[2])) == 1
    assert missed(work_ahead.forget) == 0
    told = []

    def fails():
        with work_ahead.chain(blocks, "key"):
            work_ahead.offer(blocks[1], (x,), "value", lambda: told.append(1))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not told  # the next block had no chance


def test_what_a_block_notes_is_for_the_next_one_of_the_same_forward(blocks):
    work_ahead.note_run("first")
    with work_ahead.chain(blocks, "inner"):
        assert work_ahead.last_run() is None
        work_ahead.note_run("inside")
    assert work_ahead.last_run() == "first"
    assert work_ahead.last_run() is None


@pytest.mark.parametrize("name", ["ltx-video", "wan-1.3b", "flux-dev", "llama-3-8b"])
def test_a_module_may_be_put_around_a_block_of_an_injected_model(name):
    how = {"tiny": True, "dtype": torch.float32}
    model, inputs = models.build(name, **how), models.inputs(name, **how)
    run(model, inputs)
    kw.inject(model)
    run(model, inputs)
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    blocks[1] = Writes(blocks[1])
    results = [run(model, inputs) for _ in range(3)]
    kw.restore(model)
    expected = run(model, inputs)
    assert all(same(result, expected) for result in results)

"""Recording a forward changes nothing: not its inputs, not PyTorch for other threads."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx._symbolic_trace import is_fx_tracing

from fuser.blocks import Block, Small, drawn
from kernelwright.fuser import planning
from kernelwright.fuser.recording import CannotRecord, record
from kernelwright.fuser.running import Executable
from kernelwright.ops import library


def inputs(tokens=5):
    return [t.float() for t in (drawn(2, tokens, 64), drawn(2, 64), drawn(tokens, 32))]


def block_inputs(tokens=5):
    x, condition, angles = inputs(tokens)
    return x, condition, angles.cos(), angles.sin()


WRITES = {
    "all of it": lambda x: x.mul_(2),
    "a part": lambda x: x[:, 0].add_(1),
    "a view": lambda x: x.view(-1).zero_(),
    "an item": lambda x: x.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("how", WRITES)
def test_an_input_that_is_written_to_is_found_and_left_as_it_was(how):
    def forward(x):
        WRITES[how](x)
        return x + 1

    x = drawn(2, 3, 4).float()
    before = x.clone()
    with pytest.raises(CannotRecord, match="it writes to its inputs"):
        record(Small(forward), (x,), {})
    assert torch.equal(x, before)


def test_ops_that_are_other_objects_than_were_defined_are_refused(monkeypatch):
    """A layer that is not known as one would be taken for something that all blocks share."""
    monkeypatch.setattr(library, "_defined", set())
    with pytest.raises(CannotRecord, match=r"torch\.ops was cleared"):
        record(Block(), block_inputs(), {})


class Total(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x):
        return x + self.total.add_(1)


def test_a_buffer_that_is_written_to_is_left_as_it_was():
    module = Total()
    with pytest.raises(CannotRecord, match="it writes to its inputs"):
        record(module, (drawn(2, 3).float(),), {})
    assert module.total.item() == 0


def test_what_is_reached_around_the_module():
    """A closure has the module itself, not the twin that is recorded."""
    layer = nn.Linear(4, 4)
    module = Small(lambda x: layer(x) + 1)
    module.layer = layer
    with pytest.raises(CannotRecord, match="a weight that is not read from its own module"):
        record(module, (drawn(2, 4).float(),), {})
    layer.register_buffer("table", torch.ones(4))
    module.function = lambda x: x + layer.table
    with pytest.raises(CannotRecord, match="a weight that is not read from its own module"):
        record(module, (drawn(2, 4).float(),), {})


def test_hooks_of_the_module_are_no_part_of_it():
    module, seen = Block(), []
    module.register_forward_hook(lambda module, args, out: seen.append(1) or 2 * out)
    module.register_forward_pre_hook(lambda module, args: seen.append(1))
    module.forward = lambda *given: seen.append(1)
    assert record(module, block_inputs(), {}).graph
    assert not seen


def test_others_run_the_module_while_it_is_recorded():
    module, given = Block().eval(), block_inputs()
    with torch.no_grad():
        expected = module(*given)
    done, differ = threading.Event(), []

    @torch.no_grad()
    def work():
        while not done.is_set():
            if not torch.equal(module(*given), expected):
                differ.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            record(module, given, {})
    finally:
        done.set()
        thread.join()
    assert not differ


def test_threads_record_one_after_the_other():
    call, results = nn.Module.__call__, []

    def work():
        for tokens in (3, 4, 5):
            results.append(record(Block(), block_inputs(tokens), {}))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 9
    assert not is_fx_tracing()
    assert nn.Module.__call__ is call


def test_the_backend_of_attention_that_a_forward_chooses():
    """Its choice is part of the recording; what was chosen outside is not."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v) + 1

    given = [drawn(1, 2, 40, 32, seed=i).float() for i in range(3)]
    expected, plain = attend(*given), F.scaled_dot_product_attention(*given) + 1
    assert not torch.equal(expected, plain)  # or this shows nothing
    made = record(Small(attend), tuple(given), {})
    assert torch.equal(Executable(planning.plan(made))(given)[0], expected)


def test_recording_leaves_no_weak_references_to_weights():
    """torch.utils.swap_tensors refuses tensors that have some."""
    module = Block().eval()
    table = drawn(8, 32, dtype=torch.float32)
    given = drawn(2, 8, 64, dtype=torch.float32), drawn(2, 64, dtype=torch.float32), table, table
    gc.disable()
    try:
        record(module, given, {})
        assert not any(weakref.getweakrefs(p) for p in module.parameters())
    finally:
        gc.enable()

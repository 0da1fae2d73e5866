"""Packed weights: what happens to them, and what users see of them."""

import copy
import io

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from inject.heads import WIDTH, Heads, is_packed, rows
from kernelwright.inject.reuse import packed_weights
from kernelwright.inject.runtime import model_run
from kernelwright.inject.state.tensor_samples import TensorSamples


@torch.no_grad()
def pack(heads, x=None):
    return packed_weights.packed(heads.layers, rows(heads.q.weight.dtype) if x is None else x)


def check_packed(heads):
    """The layers are packed, and the block holds their weights."""
    found = pack(heads)
    assert isinstance(found, packed_weights.Packed), found
    assert is_packed(heads)
    assert torch.equal(found.weight, torch.cat([layer.weight for layer in heads.layers]))
    if found.bias is not None:
        assert torch.equal(found.bias, torch.cat([layer.bias for layer in heads.layers]))
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_stay_what_they_were_but_for_their_place(dtype, bias):
    heads = Heads(bias, dtype)
    before = dict(heads.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    versions = {name: p._version for name, p in before.items()}
    found = check_packed(heads)
    assert found.sizes == (WIDTH, 2 * WIDTH, WIDTH)
    for name, parameter in heads.named_parameters():
        assert parameter is before[name]
        assert parameter.requires_grad
        assert torch.equal(parameter, values[name])
        assert parameter._version == versions[name]
        assert parameter.is_contiguous()
        assert parameter.storage_offset() == 0
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_weights_that_another_thread_packs_meanwhile_are_packed_at_the_next_call(monkeypatch):
    heads = Heads()
    usual = packed_weights._pack

    def overtaken(group, weights, biases):
        reader = weights[0].detach()
        blocks = usual(group, weights, biases)
        assert group.why == packed_weights.SHARED
        del reader
        usual(group, weights, biases)
        return blocks

    with monkeypatch.context() as patched:
        patched.setattr(packed_weights, "_pack", overtaken)
        assert pack(heads) == packed_weights.SHARED
    check_packed(heads)


def test_there_is_no_second_copy_and_the_block_dies_with_the_weights():
    heads = Heads()
    old = [StorageWeakRef(p.untyped_storage()) for p in heads.parameters()]
    block = StorageWeakRef(check_packed(heads).weight.untyped_storage())
    assert all(storage.expired() for storage in old)
    assert not block.expired()
    heads.to(torch.float64)
    assert block.expired()


def test_it_is_packed_once():
    heads = Heads()
    check_packed(heads)
    addresses = [p.data_ptr() for p in heads.parameters()]
    for _ in range(3):
        check_packed(heads)
    assert [p.data_ptr() for p in heads.parameters()] == addresses


def merged(heads):
    heads.k.weight.data += 1  # as peft does


def written(heads):
    with torch.no_grad():
        heads.v.bias.mul_(2)


def swapped(heads):
    heads.k.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))


def assigned(heads):
    state = {name: p.detach() + 1 for name, p in heads.named_parameters()}
    heads.load_state_dict(state, assign=True)


def moved(heads):
    heads.to(torch.bfloat16)


def new_data(heads):
    heads.q.weight.data = torch.randn(WIDTH, WIDTH)


@pytest.mark.parametrize("change", [merged, written, swapped, assigned, moved, new_data])
def test_whatever_is_done_to_a_weight_is_seen(change):
    heads = Heads()
    check_packed(heads)
    change(heads)
    check_packed(heads)


def test_a_weight_cut_short_at_the_same_address_is_seen():
    heads = Heads()
    check_packed(heads)
    heads.k.weight.data, heads.k.bias.data = heads.k.weight.data[:16], heads.k.bias.data[:16]
    assert isinstance(pack(heads), str)  # other tensors share its memory


def held(heads):
    heads.kept = heads.state_dict()
    return "shares its memory"


def tied(heads):
    heads.v.weight = heads.q.weight
    return "shares its memory"


def strided(heads):
    heads.q.weight.data = torch.randn(WIDTH, WIDTH).t()
    return "shares its memory"


def inference(heads):
    with torch.inference_mode():
        heads.q.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    return "shares its memory"


def of_processes(heads):
    heads.q.share_memory()
    return "shares its memory"


def without_bias(heads):
    heads.k.bias = None
    return packed_weights.UNLIKE


def of_another_dtype(heads):
    heads.k.bfloat16()
    return packed_weights.UNLIKE


def of_other_inputs(heads):
    heads.k.weight = nn.Parameter(torch.randn(2 * WIDTH, 2 * WIDTH))
    return packed_weights.UNLIKE


def narrow(heads):
    heads.q.weight, heads.q.bias = (nn.Parameter(torch.randn(s)) for s in ((3, WIDTH), (3,)))
    return "not a multiple of 64 bytes"


def subclass(heads):
    class Quantised(torch.Tensor):
        pass

    made = torch.randn(WIDTH, WIDTH).as_subclass(Quantised)
    heads.q._parameters["weight"] = made
    return "a tensor subclass"


SHARED = [held, tied, strided, inference, of_processes, subclass]
DIFFERENT = [without_bias, of_another_dtype, of_other_inputs, narrow]


@pytest.mark.parametrize("spoil", [*SHARED, *DIFFERENT])
def test_weights_that_cannot_lie_side_by_side_are_left_alone(spoil):
    heads = Heads()
    why = spoil(heads)
    before = [p.data_ptr() for p in heads.parameters()]
    assert why in pack(heads)
    assert why in pack(heads)
    assert [p.data_ptr() for p in heads.parameters()] == before


def test_nothing_is_packed_while_gradients_are_recorded():
    heads = Heads()
    assert packed_weights.packed(heads.layers, rows()) == "gradients are recorded"
    assert not is_packed(heads)
    check_packed(heads)
    heads(rows()).sum().backward()
    assert all(p.grad is not None for p in heads.parameters())


def test_nothing_is_packed_under_a_mode_that_makes_other_tensors():
    heads = Heads()
    x = rows()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert "a dispatch mode" in pack(heads, x)
    check_packed(heads)


def test_weights_packed_in_inference_mode_are_ordinary_ones():
    heads = Heads()
    with torch.inference_mode():
        check_packed(heads)
    assert not any(p.is_inference() for p in heads.parameters())
    heads(rows()).sum().backward()


def test_weights_that_somebody_moves_about_are_left_to_him():
    heads = Heads()
    for _ in range(packed_weights.LIMIT):
        check_packed(heads)
        heads.q.weight.data = heads.q.weight.data.clone()
    assert pack(heads) == packed_weights.MOVED
    heads.q.weight.data = heads.q.weight.data.clone()
    assert pack(heads) == packed_weights.MOVED


def test_weights_moved_now_and_then_are_packed_each_time():
    heads = Heads()
    for _ in range(2 * packed_weights.LIMIT):
        for _ in range(packed_weights.CALLS):
            check_packed(heads)
        heads.q.weight.data = heads.q.weight.data.clone()


def test_memory_that_comes_to_lie_at_the_same_address_is_not_taken_for_the_block():
    heads = Heads()
    check_packed(heads)
    group = packed_weights._groups[heads.q]
    heads.load_state_dict({n: p.detach().clone() for n, p in heads.named_parameters()}, assign=True)
    group.facts = packed_weights._facts(
        [m.weight for m in heads.layers] + [m.bias for m in heads.layers]
    )
    check_packed(heads)


def test_packed_weights_can_be_shared_with_other_processes():
    heads = Heads()
    expected = heads(rows())
    check_packed(heads)
    heads.share_memory()
    assert all(p.is_shared() for p in heads.parameters())
    assert torch.equal(heads(rows()), expected)


def test_one_layer_is_saved_as_small_as_it_is():
    heads, alone = Heads(), Heads()
    check_packed(heads)
    sizes = []
    for layer in (heads.q, alone.q):
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        sizes.append(len(file.getvalue()))
    assert sizes[0] == sizes[1]


def test_a_copy_has_memory_of_its_own():
    heads = Heads()
    check_packed(heads)
    twin = copy.deepcopy(heads)
    with torch.no_grad():
        twin.q.weight.zero_()
    assert heads.q.weight.any()
    check_packed(twin)


def test_accelerate_saves_every_weight():
    from accelerate.utils.other import clean_state_dict_for_safetensors

    heads = Heads()
    check_packed(heads)
    state = heads.state_dict()
    assert clean_state_dict_for_safetensors(dict(state)).keys() == state.keys()


class Stream:
    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


@pytest.mark.parametrize("hooked", [False, True])
def test_a_gpu_is_waited_for_when_the_forward_has_ended(hooked):
    """Unless something has hooks, which may move the weights in another stream."""
    model, x, stream, seen = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), Stream(), []
    if hooked:
        model[0].register_forward_hook(lambda *given: None)
    with model_run.begin(model, (x,), {}, TensorSamples()):
        packed_weights._wait(stream)
        seen.append(stream.waited)
    assert (seen[0], stream.waited) == (int(hooked), 1)
    packed_weights._wait(stream)
    assert stream.waited == 2

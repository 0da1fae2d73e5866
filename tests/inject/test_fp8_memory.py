"""The tier "fp8" takes 16-bit weights off the GPU, and nobody else notices.

There is no GPU here: `leaves_gpu` says that every weight lies on one, and what is checked is that
its storage is released and where its values are afterwards.
"""

import copy
from weakref import ref

import pytest
import torch
from torch import nn

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.fp8 import memory_blocks, resting, suitable_layers
from kernelwright.inject.reuse.program_products import ProgramProducts, running
from kernelwright.inject.runtime import forwards, model_run
from kernelwright.inject.state.tensor_samples import TensorSamples
from kernelwright.inject.state.weights_at_rest import is_at_rest
from kernelwright.inject.verify import accuracy

from .harness import left_behind, run, same
from .tape import graphs_on_the_cpu


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(suitable_layers, "ROWS", 4)
    monkeypatch.setattr(resting, "leaves_gpu", lambda weight: True)
    monkeypatch.setattr(memory_blocks, "SMALLEST", 2**16)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.blocks:
            x = layer(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Stack().eval().requires_grad_(False)


@pytest.fixture
def x():
    return torch.randn(8, 64)


def resting_in(model):
    return [name for name, p in model.named_parameters() if is_at_rest(p)]


def rested(model, x):
    """A layer of a model whose weights rest, and the layers of its injection."""
    kw.inject(model, numerics="fp8")
    with torch.no_grad():
        model(x)
    return model.blocks[0], getattr(forwards.installed(model.blocks[0]), forwards.MARK)


def built(name):
    how = {"tiny": True, "dtype": torch.float32}
    return models.build(name, **how), models.inputs(name, **how)


@pytest.mark.parametrize("name", ["flux-dev", "ltx-video", "sd3.5-medium", "qwen3-8b"])
def test_a_model_gives_the_same_bits_wherever_its_16_bit_weights_are(name):
    model, inputs = built(name)
    expected = run(model, inputs)
    values = {n: p.clone() for n, p in model.named_parameters()}
    objects = dict(model.named_parameters())
    kw.inject(model, numerics="fp8", keep="gpu")
    on_gpu = run(model, inputs)
    assert not resting_in(model)
    report = kw.inject(model, numerics="fp8")
    results = [run(model, inputs) for _ in range(3)]
    assert resting_in(model)
    assert "fp8 layers are in CPU memory" in str(report)
    assert all(same(result, on_gpu) for result in results)
    kw.restore(model)
    assert same(run(model, inputs), expected)
    assert not resting_in(model)
    assert not left_behind(model)
    for name, parameter in model.named_parameters():
        assert parameter is objects[name]
        assert torch.equal(parameter, values[name])


def test_the_memory_of_a_weight_is_released_once_its_layer_was_compared(model, x):
    memory = [ref(layer.weight.untyped_storage()) for layer in model.blocks]
    kw.inject(model, numerics="fp8")
    assert all(m() is not None for m in memory)
    model(x)
    assert all(m() is None for m in memory)
    assert resting_in(model) == [f"blocks.{i}.weight" for i in range(3)]


@pytest.mark.parametrize("recipes", [True, False])
def test_weights_that_stay_in_16_bits_do_not_lie_among_those_that_leave(recipes, tmp_path):
    """PyTorch gives memory back in segments of several weights."""
    model, inputs = built("ltx-video")
    kw.inject(model, numerics="fp8", keep="gpu", recipes=recipes)
    expected = run(model, inputs)
    kw.restore(model)
    layers = [getattr(b.attn2, name) for b in model.transformer_blocks for name in ("to_k", "to_v")]
    memory = [ref(layer.weight.untyped_storage()) for layer in layers]
    objects = [layer.weight for layer in layers]
    kw.inject(model, numerics="fp8", recipes=recipes)
    assert all(same(run(model, inputs), expected) for _ in range(3))
    assert all(m() is None for m in memory)
    assert all(layer.weight is o for layer, o in zip(layers, objects, strict=True))
    assert not any(map(is_at_rest, objects))
    model.save_pretrained(tmp_path)  # which refuses weights that share memory
    kw.restore(model)


@pytest.mark.filterwarnings("ignore:.*in fp8:UserWarning")
def test_the_weight_of_a_layer_that_was_refused_stays(model, x, monkeypatch):
    monkeypatch.setattr(accuracy, "error", lambda result, expected: 0.5)
    kw.inject(model, numerics="fp8")
    model(x)
    assert not resting_in(model)


def test_the_first_parameter_and_shared_ones_stay(x):
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)), *[nn.Linear(64, 64) for _ in range(3)])
    model.eval().requires_grad_(False)
    model[3].weight = model[2].weight
    kw.inject(model, numerics="fp8")
    model(x)
    assert resting_in(model) == ["1.weight"]
    kw.restore(model)
    assert model[3].weight is model[2].weight


def test_state_dict_and_files_have_the_values_of_before(model, x, tmp_path):
    values = {name: t.clone() for name, t in model.state_dict().items()}
    kw.inject(model, numerics="fp8")
    model(x)
    seen = model.state_dict()
    assert seen.keys() == values.keys()
    assert all(torch.equal(seen[name], t) for name, t in values.items())
    torch.save(seen, tmp_path / "weights")
    again = torch.load(tmp_path / "weights")
    assert all(torch.equal(again[name], t) for name, t in values.items())


def test_save_pretrained_writes_what_it_wrote_before(tmp_path):
    model, inputs = built("flux-dev")
    values = {name: t.clone() for name, t in model.state_dict().items()}
    kw.inject(model, numerics="fp8")
    run(model, inputs)
    assert resting_in(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], t) for name, t in values.items())


@pytest.mark.parametrize("counted", [True, False])
def test_a_weight_that_is_written_to_while_it_rests_counts_at_once(model, x, counted):
    kw.inject(model, numerics="fp8")
    before = model(x)
    weight = model.blocks[1].weight
    assert is_at_rest(weight)
    if counted:
        weight.mul_(2)
    else:
        weight.data += 1.0
    after = model(x)
    assert not torch.equal(before, after)
    kw.restore(model)
    assert accuracy.error(after, model(x)) < 0.15


def test_weights_that_are_loaded_while_others_rest_count_at_once(model, x):
    kw.inject(model, numerics="fp8")
    model(x)
    other = Stack().eval().requires_grad_(False)
    model.load_state_dict(other.state_dict())
    assert accuracy.error(model(x), other(x)) < 0.15
    kw.restore(model)
    assert torch.equal(model(x), other(x))


def test_a_weight_is_fetched_where_its_layer_runs_in_16_bits_and_leaves_again(model, x):
    expected = model(x)
    kw.inject(model, numerics="fp8")
    eight = model(x)
    assert torch.equal(model(x.clone().requires_grad_()), expected)  # gradients are recorded
    assert not resting_in(model)
    assert torch.equal(model(x), eight)
    assert len(resting_in(model)) == 3


def test_a_weight_that_changed_its_dtype_while_it_rested_is_fetched(model, x):
    layer, eight = rested(model, x)
    model.to(torch.bfloat16)
    changed, values = layer.weight.data_ptr(), layer.weight.clone()
    assert eight.fetch(layer)
    assert layer.weight.data_ptr() != changed
    assert torch.equal(layer.weight, values)


def test_what_others_make_of_a_weight_that_rests_is_moved_to_the_input(model, x):
    """Of a parameter on the CPU, functional_call and plain attributes get tensors on the CPU."""
    layer, eight = rested(model, x)
    eight.resting._home = meta = torch.device("meta")  # stands for a GPU
    values, bias = layer.weight.detach() * 2, layer.bias.to("meta")
    for put in (layer._parameters, layer.__dict__):
        del layer.weight, layer.bias
        put["weight"], layer.__dict__["bias"] = values, bias
        assert eight.in_16_bits(layer, x.to(meta)).shape == x.shape
        assert layer.weight is values


def test_a_parametrization_gets_its_weight_back(model, x):
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    kw.inject(model, numerics="fp8")
    with torch.no_grad():
        model(x)
        layer = model.blocks[0]
        nn.utils.parametrize.register_parametrization(layer, "weight", Twice())
        original = layer.parametrizations.weight.original
        assert is_at_rest(original)
        model(x)
    assert not is_at_rest(original)


def test_all_that_weight_norm_makes_of_a_weight_that_rests_is_moved(model, x):
    layer, eight = rested(model, x)
    nn.utils.parametrizations.weight_norm(layer)
    before = {p.data_ptr() for p in layer.parametrizations.parameters()}
    eight.resting.move(layer, torch.device("cpu"))
    after = {p.data_ptr() for p in layer.parametrizations.parameters()}
    assert len(before) == len(after) == 2
    assert not before & after


def test_a_transform_of_torch_func_leaves_weights_where_they_are(model, x):
    def loss(x):
        return model(x).square().sum()

    expected = torch.func.grad(loss)(x)
    kw.inject(model, numerics="fp8")
    with torch.no_grad():
        model(x)
    at_rest = resting_in(model)
    assert same(torch.func.grad(loss)(x), expected)
    assert resting_in(model) == at_rest
    with torch.no_grad():
        assert model(x).untyped_storage()  # no tensor of the transform is left in the model
    assert all(p.untyped_storage() for p in model.parameters())


def test_a_wrapper_from_before_a_change_of_the_class_calls_what_it_would_without_us(
    model, x, monkeypatch
):
    kw.inject(model, numerics="fp8")
    with torch.no_grad():
        model(x)
        layer, unchanged = model.blocks[0], nn.Linear.forward
        inner = layer.forward
        layer.forward = lambda x: inner(x)
        expected = layer(x)
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: unchanged(self, x) + 1)
        assert same(layer(x), expected)


def test_a_weight_that_was_written_to_while_it_was_back_is_copied_again(model, x):
    kw.inject(model, numerics="fp8")
    model(x)
    model(x.clone().requires_grad_())  # runs in 16 bits
    assert not is_at_rest(model.blocks[0].weight)
    model.blocks[0].weight.mul_(3)
    tripled = model.blocks[0].weight.clone()
    model(x)
    assert is_at_rest(model.blocks[0].weight)
    assert torch.equal(model.blocks[0].weight, tripled)
    kw.restore(model)
    assert torch.equal(model.blocks[0].weight, tripled)


@pytest.mark.parametrize("how", ["a new Parameter", "another .data"])
def test_a_weight_that_was_replaced_while_it_rested_is_not_taken_for_the_old_one(
    model, x, monkeypatch, how
):
    layer, eight = rested(model, x)
    values = layer.weight.detach() * 2
    if how == "a new Parameter":
        layer.weight = nn.Parameter(values.clone(), requires_grad=False)
    else:
        layer.weight.data = values.clone()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(resting, "leaves_gpu", lambda weight: False)  # it was made on the CPU
        model(x)
    eight.fetch(layer)
    assert torch.equal(layer.weight, values)
    with torch.no_grad():
        model(x)
    assert is_at_rest(layer.weight)
    assert torch.equal(layer.weight, values)


def test_gradients_are_those_of_eager_although_weights_had_left(model, x):
    kw.inject(model, numerics="fp8")
    model(x)
    model.requires_grad_(True)
    model(x).sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    kw.restore(model)
    model.zero_grad()
    model(x).sum().backward()
    assert all(map(torch.equal, got, [p.grad for p in model.parameters()]))


def test_a_lora_that_is_loaded_afterwards_works():
    peft = pytest.importorskip("peft")
    model, inputs = built("flux-dev")
    twin = copy.deepcopy(model)
    kw.inject(model, numerics="fp8")
    run(model, inputs)
    assert resting_in(model)
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    for each in (model, twin):
        torch.manual_seed(1)
        each.add_adapter(config)
    result, expected = run(model, inputs), run(twin, inputs)
    assert not any("base_layer" in name for name in resting_in(model))
    assert accuracy.error(result, expected) < 0.25
    model.delete_adapters("default")
    run(model, inputs)
    kw.restore(model)
    assert not resting_in(model)


@pytest.mark.parametrize("plain", [False, True], ids=["", "its weight a plain attribute"])
def test_an_adapter_is_where_the_layer_inside_it_runs(model, x, plain):
    """peft creates an adapter on the device of the weight, which is the CPU while that rests."""
    lora = pytest.importorskip("peft.tuners.lora")
    layer, eight = rested(model, x)
    eight.resting._home = torch.device("meta")  # stands for a GPU
    del eight.resting._rests[layer]
    if plain:
        values = layer.weight.detach() * 2
        del layer.weight
        layer.weight = values
    model.blocks[0] = lora.Linear(layer, "default", lora.LoraConfig(r=4), r=4)
    eight.follow_adapters(model, on_gpu=True)  # not where the weights were
    assert {p.device.type for p in model.blocks[0].lora_A.parameters()} == {"cpu"}
    eight.follow_adapters(model, on_gpu=False)
    assert {p.device.type for p in model.blocks[0].lora_A.parameters()} == {"meta"}


def test_a_copy_of_the_model_runs_and_is_restored(model, x):
    expected = model(x)
    kw.inject(model, numerics="fp8")
    eight = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), eight)
    kw.restore(twin)
    assert torch.equal(twin(x), expected)
    assert torch.equal(model(x), eight)


def test_weights_that_others_keep_moving_are_left_alone(model, x):
    kw.inject(model, numerics="fp8")
    for _ in range(resting.LIMIT):
        model(x)
        assert resting_in(model)
        for p in model.parameters():
            p.data = p.data.clone()  # as group offload does
    model(x)
    assert not resting_in(model)


def test_an_injection_inside_another_finds_all_weights(model, x):
    expected = model(x)
    kw.inject(model, numerics="fp8")
    eight = model(x)
    with kw.injected(model):
        assert not resting_in(model)
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), eight)
    assert resting_in(model)


def test_a_model_on_the_cpu_moves_to_its_device_one_layer_after_the_other(model, x):
    expected = model(x)
    kw.inject(model, numerics="fp8", device="cpu")
    assert len(resting_in(model)) == 3  # before it has run
    assert 0 < accuracy.error(model(x), expected) < 0.1
    assert not kw.inspect(model).problems
    kw.restore(model)
    assert torch.equal(model(x), expected)


def test_programs_of_recorded_blocks_fetch_what_they_read_in_16_bits(model, x):
    kw.inject(model, numerics="fp8")
    model(x)
    layer = model.blocks[0]
    eight = getattr(layer.forward, forwards.MARK)
    products = ProgramProducts(False, eight, None).of(["w"])
    given = layer.weight  # as it lies while it rests
    running.layers = {"w": layer}
    try:
        few = products(x[:2], given, layer.bias)
        assert torch.equal(few, nn.functional.linear(x[:2], layer.weight, layer.bias))
        assert not is_at_rest(layer.weight)
        with model_run.begin(model, (x,), {}, TensorSamples()):
            products(x, given, layer.bias)
        assert is_at_rest(layer.weight)
    finally:
        running.layers = {}


@pytest.mark.parametrize("counted", [True, False])
def test_graphs_are_captured_and_notice_what_is_written_to_a_weight_that_rests(model, x, counted):
    with graphs_on_the_cpu():
        report = kw.inject(model, numerics="fp8", graphs=True)
    results = [model(x) for _ in range(4)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert len(resting_in(model)) == 3
    assert report.graphs[0].captured == 1
    weight = model.blocks[1].weight
    if counted:
        weight.mul_(2)
    else:
        weight.data += 1.0
    after = [model(x) for _ in range(3)]
    assert not torch.equal(after[0], results[0])
    assert all(torch.equal(result, after[0]) for result in after)
    kw.restore(model)
    assert accuracy.error(after[0], model(x)) < 0.15


class TestDropped:
    """keep=None"""

    def test_it_runs_with_the_same_bits(self, model, x):
        kw.inject(model, numerics="fp8", keep="gpu")
        expected = model(x)
        kw.inject(model, numerics="fp8", keep=None)
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
        assert accuracy.error(model(x[:2]), expected[:2]) < 0.1  # by the fp8 weights

    def test_it_runs_after_a_change_of_dtype(self, model, x):
        kw.inject(model, numerics="fp8", keep=None)
        expected = model(x)
        model.to(torch.bfloat16)
        assert accuracy.error(model(x[:2].bfloat16()).float(), expected[:2]) < 0.1

    def test_what_needs_the_weights_says_so(self, model, x):
        kw.inject(model, numerics="fp8", keep=None)
        eight = model(x)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.weight.*dropped.*keep=\"cpu\""):
            model.state_dict()
        with pytest.raises(RuntimeError, match=r"restore: .* 3 layers were dropped"):
            kw.restore(model)
        assert torch.equal(model(x), eight)  # an error changes nothing
        nn.utils.parametrizations.weight_norm(model.blocks[0])
        with pytest.raises(RuntimeError, match=r"a parametrization: .* 1 layers were dropped"):
            model(x)

    def test_a_block_of_code_cannot_be_injected_so(self, model):
        with (
            pytest.raises(ValueError, match="keep is None"),
            kw.injected(model, numerics="fp8", keep=None),
        ):
            pass

    def test_other_values_are_refused(self, model):
        with pytest.raises(ValueError, match="keep is 'disk', expected one of"):
            kw.inject(model, numerics="fp8", keep="disk")


def test_projections_are_fused_from_weights_that_are_back():
    """Of weights on the CPU, diffusers would make a layer on the CPU."""
    how = {"tiny": True, "dtype": torch.float32}
    model, inputs = models.build("sd3.5-medium", **how), models.inputs("sd3.5-medium", **how)
    kw.inject(model, numerics="fp8")
    run(model, inputs)
    attention = model.transformer_blocks[0].attn
    assert is_at_rest(attention.to_k.weight)
    model.fuse_qkv_projections()
    assert not is_at_rest(attention.to_k.weight)
    assert torch.equal(attention.to_qkv.weight[: len(attention.to_q.weight)], attention.to_q.weight)
    kw.restore(model)
    assert "fuse_projections" not in vars(attention)

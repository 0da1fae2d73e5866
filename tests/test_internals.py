"""The private names of other libraries that this one relies on are there, and do what is relied on.

A name that a new version takes away or changes fails here, by itself and by its own name.
"""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kernelwright import library_internals as libraries
from kernelwright.backends import torch_internals as internals
from kernelwright.inject.fusions.attention import SDPA
from kernelwright.inject.graphs import generation


@pytest.mark.parametrize("name", internals.WANTED)
def test_pytorch_has(name):
    assert internals.WANTED[name], f"PyTorch {torch.__version__} has no {name}"


def test_what_is_missing_says_so_when_it_is_called():
    missing = internals._named("torch._C._no_such_name")
    del internals.WANTED["torch._C._no_such_name"]
    with pytest.raises(RuntimeError, match=r"has no torch\._C\._no_such_name; use a version"):
        missing()


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_dispatch_modes():
    assert not internals.dispatch_modes()
    with Mode():
        assert internals.dispatch_modes()


def test_function_modes():
    assert not internals.function_modes()
    with torch.device("cpu"):
        assert internals.function_modes()
        assert internals.only_default_devices()
    with torch.overrides.BaseTorchFunctionMode():
        assert internals.function_modes()
        assert not internals.only_default_devices()


def test_transforms():
    seen = []

    def function(x):
        seen.append(internals.in_functorch())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen == [True]
    assert not internals.in_functorch()


def test_whether_a_linear_layer_adds_its_bias_apart():
    weight, bias = torch.ones(8, 16), torch.ones(8)
    whole = torch.ones(2, 9, 16)
    for x in (whole, whole[:, :5], whole[:1, :5], whole[0], whole[0, :, None]):
        graph = make_fx(lambda x: F.linear(x, weight, bias))(x).graph
        called = {str(n.target) for n in graph.nodes if n.op == "call_function"}
        assert ("aten.addmm.default" not in called) == internals.linear_adds_bias_apart(x)


def test_forward_mode():
    assert not internals.in_forward_ad()
    with forward_ad.dual_level():
        assert internals.in_forward_ad()


def test_tracing():
    seen = []

    def function(x):
        seen.append(internals.in_jit_trace())
        return x + 1

    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert seen == [True]
    assert not internals.in_jit_trace()


def test_what_a_backward_is_about():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append((internals.in_backward(), internals.keeps_graph())))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [(True, True), (True, False)]
    assert not internals.in_backward()


def test_autocast():
    assert not internals.any_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert internals.any_autocast()


def register(kind, hook):
    return getattr(nn.modules.module, f"register_module_{kind}")(hook)


@pytest.mark.parametrize(
    "kind",
    ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"],
)
def test_hooks_on_all_modules(kind):
    assert not internals.all_modules_hooked()
    handle = register(kind, lambda *args: None)
    assert internals.all_modules_hooked()
    handle.remove()


def test_what_has_to_see_pytorchs_own_operations():
    assert not internals.needs_torch_ops()
    with forward_ad.dual_level():
        assert internals.needs_torch_ops()
    handle = register("forward_hook", lambda *args: None)
    assert internals.needs_torch_ops()
    handle.remove()
    assert not internals.needs_torch_ops()


def test_a_storage_that_owns_nothing():
    tensor = torch.arange(6.0)
    memory = tensor.untyped_storage()
    uses = internals.storage_uses(memory._cdata)
    seen = internals.unowned_storage(memory.data_ptr(), tensor.device, memory.nbytes())
    view = torch.empty(0).set_(seen, 2, (3,), (1,))
    tensor.data[2] = 7
    assert view.tolist() == [7, 3, 4]
    assert internals.storage_uses(memory._cdata) == uses


LAYOUTS = {
    "the same": (lambda: nn.Parameter(torch.ones(4, 6)), True),
    "another place in a storage": (lambda: nn.Parameter(torch.ones(5, 6)[1:]), True),
    "shape": (lambda: nn.Parameter(torch.ones(3, 6)), False),
    "strides": (lambda: nn.Parameter(torch.ones(6, 4).t()), False),
    "dtype": (lambda: nn.Parameter(torch.ones(4, 6).half()), False),
    "device": (lambda: nn.Parameter(torch.ones(4, 6, device="meta")), False),
    "class": (lambda: torch.ones(4, 6), False),
    "nothing": (lambda: None, False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_compared_at_once(name):
    make, same = LAYOUTS[name]
    weights = [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4))]
    check = internals.layout_check(weights)
    assert check(*weights)
    assert check(make(), weights[1]) is same


def test_a_parameter_of_another_layout_is_noticed():
    weight = nn.Parameter(torch.ones(4, 6))
    check = internals.layout_check([weight])
    weight.data = weight.data[:, :3]
    assert not check(weight)


SWITCHES = {
    "fp16 accumulation": (
        internals.gemm_switches,
        torch.backends.cuda.matmul,
        "allow_fp16_accumulation",
    ),
    "bf16 reduction": (
        internals.gemm_switches,
        torch.backends.cuda.matmul,
        "allow_bf16_reduced_precision_reduction",
    ),
    "fp16 reduction": (
        internals.gemm_switches,
        torch.backends.cuda.matmul,
        "allow_fp16_reduced_precision_reduction",
    ),
    "cuDNN": (internals.convolution_switches, torch.backends.cudnn, "enabled"),
    "benchmark": (internals.convolution_switches, torch.backends.cudnn, "benchmark"),
    "deterministic": (internals.convolution_switches, torch.backends.cudnn, "deterministic"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_decides_a_kernel_is_read(name):
    read, where, attribute = SWITCHES[name]
    before, value = read(), getattr(where, attribute)
    try:
        setattr(where, attribute, not value)
        assert read() != before
    finally:
        setattr(where, attribute, value)
    assert read() == before


def test_the_precision_of_float32_is_read():
    before = torch.get_float32_matmul_precision()
    read = []
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        read.append(internals.float32_switches())
    torch.set_float32_matmul_precision(before)
    assert read[0] != read[1]


@pytest.mark.parametrize("name", ["cudnn", "flash", "mem_efficient", "math"])
def test_a_switch_of_attention_is_read(name):
    before = internals.attention_switches()
    switch = getattr(torch.backends.cuda, f"enable_{name}_sdp")
    switch(False)
    try:
        assert internals.attention_switches() != before
    finally:
        switch(True)
    assert internals.attention_switches() == before


def test_deterministic_algorithms_are_read():
    before, on = internals.gemm_switches(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not on)
    try:
        assert internals.gemm_switches() != before
    finally:
        torch.use_deterministic_algorithms(on)
    assert internals.gemm_switches() == before


def test_views_know_their_base():
    x = torch.ones(4, 4)
    assert internals.view_base(x) is x
    assert internals.view_base(x[1:, 2]) is x


def test_uses_of_a_storage_are_counted():
    x = torch.ones(4)
    storage = x.untyped_storage()
    alone = internals.storage_uses(storage._cdata)
    view = x.view(2, 2)
    assert internals.storage_uses(storage._cdata) == alone + 1
    del view
    assert internals.storage_uses(storage._cdata) == alone


def test_modules_compiled_in_place():
    module = nn.Linear(2, 2)
    assert not internals.is_compiled(module)
    module.compile(backend="eager")
    assert internals.is_compiled(module)
    internals.forget_compiled(module)
    assert not internals.is_compiled(module)


def test_what_dynamo_counts():
    torch.compiler.reset()
    internals.compile_counters().clear()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert internals.compile_counters()["stats"]["unique_graphs"] == 1


def test_gemms_without_a_public_name():
    x, w, b = torch.randn(16, 16), torch.randn(16, 16), torch.randn(16)
    got = internals.addmm_activation(b, x, w.t(), use_gelu=True)
    want = torch.nn.functional.gelu(torch.addmm(b, x, w.t()), approximate="tanh")
    assert got.shape == want.shape
    assert callable(internals.scaled_mm)


# diffusers, transformers, accelerate, peft


@pytest.fixture(scope="module")
def diffusers():
    return pytest.importorskip("diffusers")


def test_hooks_of_diffusers(diffusers):
    from diffusers.hooks import HookRegistry, ModelHook

    module = nn.Linear(2, 2)
    assert not libraries.has_library_hook(module)
    assert libraries.diffusers_hooks(module) is None
    assert list(libraries.forward_slots(module)) == []
    HookRegistry.check_if_exists_or_initialize(module).register_hook(ModelHook(), "mine")
    assert libraries.has_library_hook(module)
    assert list(libraries.diffusers_hooks(module)) == ["mine"]
    # the outermost is that of the hook, which holds the module's own
    around, own = (value for _, _, value in libraries.forward_slots(module))
    assert around is vars(module)["forward"]
    assert own.__func__ is nn.Linear.forward


def test_hooks_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module

    module = nn.Linear(2, 2)
    assert libraries.accelerate_moves_weights(module) is None
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    assert libraries.has_library_hook(module)
    assert libraries.accelerate_moves_weights(module) is None
    slots = {name: value for _, name, value in libraries.forward_slots(module)}
    assert slots[libraries.ACCELERATE_FORWARD].__func__ is nn.Linear.forward
    accelerate.hooks.remove_hook_from_module(module)
    assert not libraries.has_library_hook(module)
    moved = SequentialHook(
        AlignDevicesHook(execution_device="cpu"),
        AlignDevicesHook(execution_device="cpu", offload=True),
    )
    assert libraries._moves_weights(moved) == "AlignDevicesHook"


def test_layers_of_peft():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(4, 4))
    assert libraries.peft_layers(model.modules()) == []
    linear = model[0]
    adapted = peft.inject_adapter_in_model(
        peft.LoraConfig(target_modules=["0"], r=2, lora_alpha=3), copy.deepcopy(model)
    )
    (layer,) = libraries.peft_layers(adapted.modules())
    assert isinstance(libraries.base_layer(layer), nn.Linear)
    assert libraries.base_layer(linear) is None
    assert libraries.base_layer(layer) not in list(libraries.peft_children(layer))
    assert list(libraries.peft_scales(layer)) == [1.5]
    assert list(libraries.peft_scales(linear)) == []


def test_attention_of_diffusers(diffusers):
    from diffusers import LTXVideoTransformer3DModel
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    assert libraries.active_attention_backend() == AttentionBackendName.NATIVE
    with attention_backend("_native_math"):
        assert libraries.active_attention_backend() == AttentionBackendName._NATIVE_MATH
    model = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=8,
    )
    assert libraries.repeated_blocks(model) == ("LTXVideoTransformerBlock",)
    processor = model.transformer_blocks[0].attn1.processor
    assert libraries.processor_choices(processor) == (None, None)
    assert not any(map(libraries.exchanges_tensors, model.modules()))
    assert callable(getattr(libraries.attention_dispatch(), libraries.PARALLEL_FUNCTION))
    with attention_backend("native"):  # a model's backend becomes that of the process, too
        model.set_attention_backend("_native_math")
    assert libraries.active_attention_backend() == AttentionBackendName.NATIVE
    assert libraries.processor_choices(processor)[0] == AttentionBackendName._NATIVE_MATH
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    libraries.reset_cache(model)


def test_outputs_that_transformers_collects():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaModel(config).eval()
    assert libraries.repeated_blocks(model) == ("LlamaDecoderLayer",)
    assert libraries.repeated_blocks(nn.Linear(2, 2)) == ()
    seen = []

    def look(module, args):
        seen.append(libraries.collecting_outputs())

    handle = model.layers[0].self_attn.q_proj.register_forward_pre_hook(look)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with torch.no_grad():
        model(tokens, output_hidden_states=True)
        handle.remove()
    assert seen == [True]
    assert not libraries.collecting_outputs()
    kept = [h for m in model.modules() for h in m._forward_hooks.values()]
    assert kept
    assert all(map(libraries.collects_outputs, kept))


def test_static_caches():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=8)
    cache = transformers.StaticCache(config=config, max_cache_len=4)
    assert libraries.is_kv_cache(cache)
    assert not libraries.is_kv_cache({})
    layers = libraries.static_cache_layers(cache)
    assert not layers[0].is_initialized
    assert libraries.static_cache_layer(cache, 0) is None
    layers[0].update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    assert layers[0].is_initialized
    assert layers[0].cumulative_length == 3
    assert layers[0].keys.shape == layers[0].values.shape == (1, 2, 4, 4)
    assert libraries.static_cache_layer(cache, 0) is layers[0]
    assert libraries.static_cache_layer(cache, 1) is None
    assert libraries.static_cache_layers(transformers.DynamicCache()) is None
    assert libraries.static_cache_layer(transformers.DynamicCache(), 0) is None


def test_caches_that_can_be_copied():
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, hidden_size=8)
    fixed = transformers.StaticCache(config=config, max_cache_len=4)
    every = range(6)
    kinds = {type(layer).__name__ for layer in libraries.plain_cache_layers(fixed, every)}
    assert kinds == {"StaticLayer", "StaticSlidingWindowLayer"}
    assert all(map(libraries.writes_in_place, fixed.layers))
    growing = transformers.DynamicCache(config=config)
    kinds = {type(layer).__name__ for layer in libraries.plain_cache_layers(growing, every)}
    assert kinds == {"DynamicLayer", "DynamicSlidingWindowLayer"}
    assert not any(map(libraries.writes_in_place, growing.layers))
    assert libraries.plain_cache_layers(transformers.DynamicCache(), {3}) == []  # adds it later
    growing.layers[0].update = print
    assert libraries.plain_cache_layers(growing, {1}) == [growing.layers[1]]
    other = transformers.EncoderDecoderCache(transformers.DynamicCache(), growing)
    moved = transformers.DynamicCache(config=config)
    moved.offloading = True
    for cache in (growing, other, moved, {}):
        assert libraries.plain_cache_layers(cache, every) is None


def test_layers_with_states_of_other_kinds_are_no_plain_layers_of_a_cache():
    transformers = pytest.importorskip("transformers")
    kinds = ["linear_attention", "full_attention"]
    config = transformers.Qwen3NextConfig(num_hidden_layers=2, layer_types=kinds)
    cache = transformers.DynamicCache(config=config)
    assert libraries.plain_cache_layers(cache, {0}) is None
    assert libraries.plain_cache_layers(cache, {1}) == [cache.layers[1]]
    for name in ("update_conv_state", "update_recurrent_state"):
        assert hasattr(cache.layers[0], name)
        assert name in libraries.CACHE_UPDATES


def test_layers_ask_for_their_attention_function():
    pytest.importorskip("transformers.modeling_utils")
    get = getattr(libraries.attention_interface(), libraries.GET_ATTENTION)
    found = get(libraries.attention_interface()(), "sdpa", None)
    assert found.__module__ == SDPA
    assert get(libraries.attention_interface()(), "eager", print) is print


def test_sliding_windows_count_in_python():
    from transformers.cache_utils import StaticSlidingWindowLayer

    layer = StaticSlidingWindowLayer(max_cache_len=8, sliding_window=4)
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    assert layer.cumulative_length_int == 3
    assert layer.max_cache_len == 4


def test_generate_asks_whether_to_compile():
    transformers = pytest.importorskip("transformers")
    assert callable(transformers.GenerationMixin._valid_auto_compile_criteria)


def test_generate_can_read_one_token_late():
    transformers = pytest.importorskip("transformers")
    mixin = transformers.GenerationMixin
    if not hasattr(libraries.generation_module(), libraries.DEFERRED_STOP_CHECK):
        pytest.skip("transformers before 5.22")
    kind = transformers.generation.utils.DeferredStopCheck
    kind = getattr(kind, "usual", kind)  # ours, if a test of injection came first
    assert list(inspect.signature(kind.is_supported).parameters) == [
        *("device", "cache", "cache_is_returned", "is_assistant")
    ]
    for name in (generation.PROCESSORS, generation.CRITERIA):
        assert callable(getattr(mixin, name))


def test_own_causal_lm_loss():
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.loss.loss_utils import ForCausalLMLoss

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes))
    assert libraries.own_causal_lm_loss(model) is ForCausalLMLoss
    assert libraries.own_causal_lm_loss(model.model) is None
    assert libraries.own_causal_lm_loss(nn.Linear(2, 2)) is None
    model.loss_function = lambda *args, **kwargs: None
    assert vars(model)[libraries.OWN_LOSS] is model.loss_function
    assert libraries.own_causal_lm_loss(model) is None

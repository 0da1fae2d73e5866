"""Blocks that do with a key-value cache, or with attention over it, what layers of transformers do
not do: they have eager's bits, and their caches eager's contents, at every call."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernelwright as kw
from inject.harness import same
from inject.tape import graphs_on_the_cpu

transformers = pytest.importorskip("transformers")
FUNCTIONS = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
DynamicCache = transformers.DynamicCache
OUTSIDE = "outside of attention"


class Config:
    def __init__(self, implementation):
        self._attn_implementation = implementation


class Attention(nn.Module):
    """Attention of nobody's, whose `body` gets query, key and value, cache and mask."""

    def __init__(self, number, body, implementation):
        super().__init__()
        self.layer_idx, self.body, self.config = number, body, Config(implementation)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.gain = nn.Parameter(torch.rand(16))

    def forward(self, x, past_key_values=None, attention_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y = self.body(self, q, k, v, past_key_values, attention_mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, number, body, implementation, tail):
        super().__init__()
        self.norm1, self.norm2, self.tail = nn.RMSNorm(32), nn.RMSNorm(32), tail
        self.attention = Attention(number, body, implementation)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, scale, past_key_values=None, attention_mask=None):
        y = self.norm1(x) * (1 + scale) + scale
        x = x + scale * self.attention(y, past_key_values, attention_mask)
        y = self.norm2(x) * (1 + scale) + scale
        return self.tail(x + scale * self.down(F.gelu(self.up(y))))


class Decoder(nn.Module):
    def __init__(self, body, implementation="eager", tail=None, layers=3):
        super().__init__()
        torch.manual_seed(0)
        made = (Layer(i, body, implementation, tail or nn.Identity()) for i in range(layers))
        self.layers = nn.ModuleList(made)

    def forward(self, x, cache, mask=None):
        for layer in self.layers:
            x = layer(x, x.mean(1, True), past_key_values=cache, attention_mask=mask)
        return x


def scores(module, q, k, v, mask, scaling=0.25, **how):
    weights = (q @ k.transpose(2, 3) * scaling).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), weights


def function_of(module):
    return FUNCTIONS.get_interface(module.config._attn_implementation, scores)


@torch.no_grad()
def steps(model, sizes=(1,) * 10, before=lambda step, cache: None):
    """The results of a text in chunks, and what the cache holds in the end."""
    torch.manual_seed(1)
    x = torch.randn(2, sum(sizes), 32)
    cache, found, start = DynamicCache(), [], 0
    for step, size in enumerate(sizes):
        before(step, cache)
        found.append(model(x[:, start : start + size], cache))
        start += size
    return found, [(layer.keys, layer.values) for layer in cache.layers]


def check(model, *given, quietly=True, **how):
    """Eager's bits at the first calls and after them; the lines of the report."""
    model = model.eval()
    want = steps(copy.deepcopy(model), *given, **how)
    with warnings.catch_warnings(), kw.injected(model, recipes=False) as report:
        if quietly:
            warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            assert same(steps(model, *given, **how), want)
    return "; ".join(why for line in report.blocks for why in line.why)


def attends(m, q, k, v, cache, mask):
    return F.scaled_dot_product_attention(q, *cache.update(k, v, m.layer_idx), mask)


def reads_the_length_of_weights(m, q, k, v, cache, mask):
    y, weights = function_of(m)(m, q, *cache.update(k, v, m.layer_idx), mask)
    return y.transpose(1, 2) * (2 if weights.shape[-1] > 4 else 1)


def computes_with_weights(m, q, k, v, cache, mask):
    y, weights = function_of(m)(m, q, *cache.update(k, v, m.layer_idx), mask)
    return y.transpose(1, 2) * weights[..., -1:]


def asks_with_the_keys(m, q, k, v, cache, mask):
    k, v = cache.update(k, v, m.layer_idx)
    return F.scaled_dot_product_attention(k, k, v)[:, :, -q.shape[2] :]


def chooses_its_function(m, q, k, v, cache, mask):
    attend = FUNCTIONS.get_interface("eager", scores)
    return attend(m, q, *cache.update(k, v, m.layer_idx), mask)[0].transpose(1, 2)


def asks_for_the_class(m, q, k, v, cache, mask):
    cache.calls = getattr(cache, "calls", 0) + 1
    return attends(m, q, k, v, cache, mask) * cache.calls


def counts_in_the_cache(m, q, k, v, cache, mask):
    count = cache.__dict__["count"] = cache.__dict__.get("count", 0) + 1
    return attends(m, q, k, v, cache, mask) * count


def scales_by_the_class(m, q, k, v, cache, mask):
    scale = 0.5 if type(cache) is DynamicCache else 0.25
    return F.scaled_dot_product_attention(q, *cache.update(k, v, m.layer_idx), mask, scale=scale)


REFUSED = {
    reads_the_length_of_weights: "an attention function of your own",
    computes_with_weights: "an attention function of your own",
    asks_with_the_keys: OUTSIDE,
    asks_for_the_class: "it reads calls of its cache",
    counts_in_the_cache: "it reads __dict__ of its cache",
}


@pytest.mark.parametrize("sizes", [(1,) * 10, (3, 3, 3)], ids=str)
@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_it_is_refused_with_the_reason(body, sizes):
    assert REFUSED[body] in check(Decoder(body), sizes)


@pytest.mark.parametrize("sizes", [(1,) * 10, (3, 3, 3)], ids=str)
def test_a_comparison_on_one_key_proves_nothing(sizes):
    """While a forward is recorded something else stands in the place of its cache."""
    check(Decoder(scales_by_the_class), sizes, quietly=False)


@pytest.mark.parametrize("body", [reads_the_length_of_weights, computes_with_weights])
def test_weights_of_attention_are_as_long_as_the_cache(body, monkeypatch):
    """Those of transformers' own functions, too."""
    monkeypatch.setattr(scores, "__module__", "transformers.models")
    assert OUTSIDE in check(Decoder(body), (3, 3, 3))


def test_another_function_than_the_config_names():
    assert "it chooses its attention function itself" in check(
        Decoder(chooses_its_function, "sdpa")
    )


class ReturnsItsKeys(Layer):
    def forward(self, x, scale, past_key_values=None, attention_mask=None):
        y = super().forward(x, scale, past_key_values, attention_mask)
        return y, self.attention.kept


class KeysOut(Decoder):
    def __init__(self):
        super().__init__(attends)
        for number in range(3):
            self.layers[number] = ReturnsItsKeys(number, self.keeps, "eager", nn.Identity())

    @staticmethod
    def keeps(m, q, k, v, cache, mask):
        k, v = cache.update(k, v, m.layer_idx)
        vars(m)["kept"] = k
        return F.scaled_dot_product_attention(q, k, v, mask)

    def forward(self, x, cache, mask=None):
        for layer in self.layers:
            x, keys = layer(x, x.mean(1, True), past_key_values=cache)
        return x, keys


def test_a_block_that_returns_its_keys():
    check(KeysOut())


class Doubled(nn.Module):
    """Writes to as many rows as values say."""

    def forward(self, x):
        rows = (x[..., 0] > 0).flatten().nonzero()[:, 0]
        flat = x.flatten(0, 1)
        return flat.index_add(0, rows, flat[rows] * 2).view_as(x)


def test_a_shape_that_turns_out_when_the_cache_is_written_to():
    assert "shape depends on values" in check(Decoder(attends, tail=Doubled()), (3,) * 4)


def half(m, q, k, v, cache, mask):
    return F.scaled_dot_product_attention(q, *cache.update(k, v, m.layer_idx // 2), mask)


def test_a_layer_that_counts_otherwise_is_left_alone_without_a_warning():
    check(Decoder(half, layers=4))
    assert "no module of it has the layer_idx" in check(Decoder(half, layers=4), (3, 3, 3))


@pytest.mark.parametrize("indices", [(0, 0, 1), (5, 0, 1)], ids=str)
def test_blocks_whose_modules_have_other_indices_share_no_calls(indices):
    """(block, its first attention, its second) of one block; the others have indices of their
    own."""

    class Two(nn.Module):
        def __init__(self, own, first, second):
            super().__init__()
            self.layer_idx = own
            self.a = Layer(first, attends, "eager", nn.Identity())
            self.b = Layer(second, attends, "eager", nn.Identity())

        def forward(self, x, scale, past_key_values=None, attention_mask=None):
            return self.b(self.a(x, scale, past_key_values), scale, past_key_values)

    model = Decoder(attends)
    numbers = indices, (2, 2, 3), (7, 4, 5), (9, 6, 7)
    model.layers = nn.ModuleList(Two(*each) for each in numbers)
    check(model)


def doubled_keys(step, cache):
    """What somebody does to a cache, or to all of them, while a model runs."""
    if step == 1:
        own = cache.update
        cache.update = lambda k, v, *rest, **how: own(k * 2, v, *rest, **how)


def test_a_cache_that_is_patched_between_two_calls():
    for sizes in ((1,) * 10, (3, 1, 1, 1, 1, 1, 1)):
        check(Decoder(attends), sizes, before=doubled_keys)


def test_a_class_of_caches_that_was_patched(monkeypatch):
    """As packages do that compress what a cache holds: it counts, and evicts."""
    own = DynamicCache.update

    def update(self, k, v, number, *rest, **how):
        seen = self.__dict__.setdefault("seen", {})
        seen[number] = seen.get(number, 0) + k.shape[2]
        k, v = own(self, k, v, number, *rest, **how)
        if seen[number] > 4:
            self.layers[number].keys, self.layers[number].values = k[:, :, 1:], v[:, :, 1:]
        return k, v

    monkeypatch.setattr(DynamicCache, "update", update)
    assert "an input that it may write to" in check(Decoder(attends), (3, 1, 1, 1, 1, 1, 1))


def by_length(module, q, k, v, mask, scaling=0.25, **how):
    y = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling)
    long = k.shape[2] > 6
    return (y.contiguous().transpose(1, 2) if long else y.transpose(1, 2).contiguous()), None


def noisy(module, q, k, v, mask, scaling=0.25, **how):
    y = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling)
    return (y + torch.randn(y.shape)).transpose(1, 2).contiguous(), None


def weighted(module, q, k, v, mask, scaling=0.25, **how):
    y = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling)
    return (y * module.gain).transpose(1, 2).contiguous(), None


def asks(m, q, k, v, cache, mask):
    return function_of(m)(m, q, *cache.update(k, v, m.layer_idx), mask)[0].transpose(1, 2)


@pytest.mark.parametrize("function", [by_length, noisy, weighted], ids=lambda f: f.__name__)
@pytest.mark.parametrize("known", [False, True], ids=["ones own", "of transformers"])
def test_attention_functions(function, known, monkeypatch):
    """Those of a library do not draw; all may read weights, and return rows in any layout."""
    if known and function is noisy:
        pytest.skip("no attention function of transformers does that")
    name = f"tests-{function.__name__}"
    if known:
        monkeypatch.setattr(function, "__module__", "transformers.models")
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, name, function)
    why = check(Decoder(asks, name), (3,) * 4)
    assert ("an attention function of your own" in why) is not known


def test_an_attention_function_that_reads_a_weight():
    """GPT-OSS: the sinks of its attention."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.GptOssConfig(
        **sizes, **heads, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0
    )
    model = transformers.GptOssForCausalLM(config).eval()
    words = torch.arange(3, 10)[None]
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}

    def generated():
        return model.generate(words, **how, output_logits=True, return_dict_in_generate=True)

    want = generated()
    with kw.injected(model):
        for _ in range(2):
            got = generated()
            assert torch.equal(got.sequences, want.sequences)
            assert all(map(torch.equal, got.logits, want.logits))


class Past(nn.Module):
    """Keys and values in a tuple, under the name that transformers has for a cache."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(32), nn.RMSNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, scale, past_key_values, attention_mask):
        y = self.norm1(x) * (1 + scale) + scale
        q, k, v = self.qkv(y).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        k, v = (torch.cat(pair, 2) for pair in zip(past_key_values, (k, v), strict=True))
        weights = (q @ k.transpose(2, 3) * 0.25 + attention_mask).softmax(-1)
        x = x + scale * self.out((weights @ v).transpose(1, 2).flatten(2))
        y = self.norm2(x) * (1 + scale) + scale
        return x + scale * self.down(F.gelu(self.up(y)))


@pytest.mark.parametrize(
    "shapes", [[(1, 1), (1, 1), (2, 1), (2, 2)], [(2, 1), (2, 1), (1, 1)]], ids=str
)
def test_a_mask_beside_a_tuple_of_tensors_keeps_its_shape(shapes):
    torch.manual_seed(0)
    layers = nn.ModuleList(Past() for _ in range(3))
    model = nn.Module()
    model.layers = layers

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x, past, mask):
            for layer in self.layers:
                x = layer(x, x.mean(1, True), past_key_values=past, attention_mask=mask)
            return x

    model, past = Model().eval(), (torch.randn(2, 2, 4, 16), torch.randn(2, 2, 4, 16))
    x = torch.randn(2, 3, 32)
    masks = [torch.randn(*shape, 3, 7) for shape in shapes]
    with torch.no_grad():
        want = [model(x, past, mask) for mask in masks]
        with kw.injected(model, recipes=False):
            for _ in range(2):
                for mask, expected in zip(masks, want, strict=True):
                    assert torch.equal(model(x, past, mask), expected)


def test_autocast_after_calls_without_it():
    model = Decoder(attends).eval()
    x = torch.randn(2, 4, 32)

    def calls(model):
        cache, found = DynamicCache(), []
        for step in range(4):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=step == 3):
                found.append(model(x[:, step : step + 1], cache))
        return found

    want = calls(copy.deepcopy(model))
    with warnings.catch_warnings(), kw.injected(model, recipes=False):
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            assert same(calls(model), want)


class Held(nn.Module):
    """A model that holds the keys and values of what it has seen."""

    def __init__(self, body, cache):
        super().__init__()
        self.decoder, self.cache = Decoder(body), cache()

    def forward(self, x):
        return self.decoder(x, self.cache)


def in_a_dict(m, q, k, v, cache, mask):
    if m.layer_idx in cache:
        k, v = (torch.cat(pair, 2) for pair in zip(cache[m.layer_idx], (k, v), strict=True))
    cache.update({m.layer_idx: (k, v)})
    return F.scaled_dot_product_attention(q, k, v)


class OwnCache:
    def __init__(self):
        self.kept = {}

    def update(self, k, v, number):
        if number in self.kept:
            k, v = (torch.cat(pair, 2) for pair in zip(self.kept[number], (k, v), strict=True))
        self.kept[number] = k, v
        return k, v


HELD = {
    "dict": (in_a_dict, dict),
    "of ones own": (attends, OwnCache),
    "growing": (attends, DynamicCache),
}


@pytest.mark.parametrize("kind", HELD)
@torch.no_grad()
def test_no_graph_of_a_model_that_holds_its_cache(kind):
    """A capture runs a forward more than once."""
    torch.manual_seed(0)
    model = Held(*HELD[kind]).eval()
    x = torch.randn(2, 8, 32)
    twin = copy.deepcopy(model)
    want = [twin(x[:, i : i + 1]) for i in range(8)]
    with graphs_on_the_cpu(), kw.injected(model, recipes=False, graphs=True) as report:
        for i, expected in enumerate(want):
            assert torch.equal(model(x[:, i : i + 1]), expected), i
    (graphs,) = report.graphs
    assert graphs.captured == 0
    assert any("such as a cache" in why for why in graphs.reasons)

"""`fused` runs attention by lengths where a mask says no more; `exact` as eager does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import kernelwright as kw
from inject.harness import check_exact, check_fused, run, same, tensors
from inject.language import SIZES, model_of, words
from inject.tape import graphs_on_the_cpu
from kernelwright import models
from kernelwright.fuser import attention_by_lengths
from kernelwright.inject.fusions import all_scores
from kernelwright.inject.graphs.host_reads import OTHER_VALUES
from kernelwright.inject.reuse import programs
from kernelwright.inject.runtime.sites import eagerly
from kernelwright.ops.attention import window

PRESETS = ["hunyuan-video", "hunyuan-video-1.5"]
TOKENS, WIDTH, HEADS = 12, 64, 2
MORE = "attention with its mask: it says more than lengths"
# of 7 words of two samples; the last of one are padding
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1] * 7])


@pytest.fixture
def attended(monkeypatch):
    """(has it a mask?, number of keys) of each attention that could run by lengths."""
    found, fastest = [], programs.attention

    def noted(query, key, value, mask, *how):
        found.append((mask is not None, key.shape[2]))
        return fastest(query, key, value, mask, *how)

    monkeypatch.setattr(programs, "attention", noted)
    return found


@pytest.fixture
def reads(monkeypatch):
    """Each reading of a mask on the host."""
    found, own = [], attention_by_lengths.read

    def noted(mask, *sizes):
        found.append(tuple(mask.shape))
        return own(mask, *sizes)

    monkeypatch.setattr(attention_by_lengths, "read", noted)
    return found


def built(name, dtype=torch.float32, **sizes):
    how = {"tiny": True, "dtype": dtype}
    return models.build(name, **how), models.inputs(name, **how, **sizes)


def gemma():
    """Two layers that see a window of three words, one that sees all before, and so on."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    sizes = {**SIZES, "num_hidden_layers": len(kinds), "sliding_window": 3, "layer_types": kinds}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).eval()
    for weight in model.parameters():
        if weight.ndim == 1:
            nn.init.uniform_(weight, 0.5, 1.5)
    return model


def close(got, expected):
    """As close as two orders of float32 sums are; another mask gives far more than that."""
    pairs = zip(tensors(got), tensors(expected), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


@torch.no_grad()
def follows(model, inputs):
    """Whether an injected model gives eager's result, and gives it again."""
    with eagerly():
        expected = model(**inputs)
    return all(close(model(**inputs), expected) for _ in range(2))


@pytest.fixture
def noted_masks(monkeypatch):
    """The masks of PyTorch's attention."""
    plain, masks = programs.plain_attention, []

    def noted(query, key, value, mask, *how):
        masks.append(mask)
        return plain(query, key, value, mask, *how)

    monkeypatch.setattr(programs, "plain_attention", noted)
    return masks


@torch.no_grad()
def test_exact_makes_the_numbers_of_a_mask_once_for_all_blocks(noted_masks):
    model, inputs = built("hunyuan-video-1.5", torch.bfloat16)
    check_exact(model, inputs)
    kw.inject(model)
    for _ in range(2):
        run(model, inputs)
    noted_masks.clear()
    run(model, inputs)
    width = noted_masks[-1].shape[-1]
    of_blocks = [mask for mask in noted_masks if mask.shape[-1] == width]
    assert len(of_blocks) == len(model.transformer_blocks)
    assert of_blocks[0].dtype == torch.bfloat16
    assert all(mask is of_blocks[0] for mask in of_blocks)


@torch.no_grad()
def test_exact_makes_the_numbers_of_two_masks_that_take_turns_once_for_all_blocks(noted_masks):
    model, inputs = gemma().to(torch.bfloat16), words(attention_mask=PADDED)
    expected = run(model, inputs)
    kw.inject(model)
    assert all(same(run(model, inputs), expected) for _ in range(4))
    noted_masks.clear()
    assert same(run(model, inputs), expected)
    window, whole = noted_masks[0], noted_masks[2]
    assert [mask is window or mask is whole for mask in noted_masks] == [True] * 6
    assert window.dtype == whole.dtype == torch.bfloat16
    assert not torch.equal(window, whole)


# (has it a mask?, number of keys): 2 of 8 words of a prompt are valid beside 18 cells; in 1.5 the
# 3 words of the refiner, and with them 2 glyphs beside 72 cells
KEYS = {"hunyuan-video": {(False, 20)}, "hunyuan-video-1.5": {(False, 3), (False, 77)}}


@pytest.mark.parametrize("name", PRESETS)
def test_padded_text_is_as_close_to_float32_as_eager(name, attended):
    report = check_fused(*built(name, torch.bfloat16))
    assert KEYS[name] <= set(attended)
    lines = "\n".join(map(str, report.blocks))
    for _, keys in KEYS[name]:
        assert f"attention by lengths: {keys} of " in lines


@pytest.mark.parametrize("name", PRESETS)
def test_exact_runs_as_eager_does(name, attended, reads):
    report = check_exact(*built(name, torch.bfloat16))
    assert attended == reads == []
    assert not any(line.masks for line in report.blocks)


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_samples_of_different_lengths(name, attended):
    model, inputs = built(name, batch=2)
    kw.inject(model, numerics="fused")
    assert follows(model, inputs)
    attended.clear()
    model(**inputs)
    (without,) = {keys for masked, keys in attended if not masked} & {20, 77}
    assert any(keys > without for masked, keys in attended if not masked)


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_a_mask_that_is_written_to_and_another_length(name):
    model, inputs = built(name)
    kw.inject(model, numerics="fused")
    assert follows(model, inputs)
    mask = inputs["encoder_attention_mask"]
    before = run(model, inputs)
    mask[:, :5] = 1
    assert follows(model, inputs)
    assert not close(run(model, inputs), before)
    mask.data.fill_(1)  # not counted by the version
    assert follows(model, inputs)
    other = torch.zeros_like(mask)
    other[:, :3] = 1
    assert follows(model, {**inputs, "encoder_attention_mask": other})


@torch.no_grad()
def test_a_mask_is_read_once_per_forward(reads):
    model, inputs = built("hunyuan-video")
    kw.inject(model, numerics="fused")
    for _ in range(3):
        model(**inputs)
    reads.clear()
    model(**inputs)
    assert reads == [(1, 1, 1, 26)]  # by blocks of two classes; the refiner's says more


@torch.no_grad()
def test_masks_are_used_where_blocks_must_not_share_what_they_say(reads):
    model, inputs = built("hunyuan-video")
    kw.inject(model, numerics="fused")
    with torch.inference_mode():
        assert follows(model, inputs)
    assert reads == []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        heads = self.qkv(self.norm(x) * 2 + 1).unflatten(-1, (3, HEADS, -1))
        y = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), mask)
        x = x + self.out(y.transpose(1, 2).flatten(2)).tanh() * 0.5
        return x + self.down(F.silu(self.up(self.norm(x) * 3 - 1))) * 0.5


class Expands(Block):
    """Makes a mask of its own of the one it is given."""

    def forward(self, x, mask):
        return super().forward(x, mask.expand(-1, HEADS, x.shape[1], -1))


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.fixture(params=[Block, Expands], ids=["given", "expanded"])
def model(request):
    torch.manual_seed(0)
    return Model(request.param).eval().requires_grad_(False)


def given(mask):
    generator = torch.Generator().manual_seed(mask.shape[0])
    return {"x": torch.randn(mask.shape[0], TOKENS, WIDTH, generator=generator), "mask": mask}


def keys(*lengths):
    return (torch.arange(TOKENS) < torch.tensor(lengths)[:, None])[:, None, None]


def pairs(*lengths):
    return keys(*lengths) & keys(*lengths).transpose(2, 3)


def added(mask, hidden):
    return torch.zeros(mask.shape).masked_fill(~mask, hidden)


INFINITY, LEAST = float("-inf"), torch.finfo(torch.float32).min
BY_LENGTHS = {
    "all": (keys(TOKENS), {TOKENS}),
    "keys": (keys(7), {7}),
    "rows too": (pairs(7), {7}),
    "two samples": (keys(7, 10), {7, 10}),
    "two samples, rows too": (pairs(7, 10), {7, 10}),
    "two alike": (pairs(7, 7), {7}),
    "one without a key": (pairs(7, 0), {7}),
    "infinity": (added(pairs(7), INFINITY), {7}),
    "the least number": (added(keys(7), LEAST), {7}),
}
RANDOM = torch.rand(1, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.5
WITH_MASK = {
    "random": RANDOM,
    "a bias": RANDOM.float(),
    "rows hidden by the least number": added(pairs(7), LEAST),
    "a large number": added(keys(7), -10000.0),
}


@pytest.mark.parametrize("name", BY_LENGTHS)
@torch.no_grad()
def test_masks_that_say_only_lengths(name, model, attended):
    mask, lengths = BY_LENGTHS[name]
    report = kw.inject(model, numerics="fused", verify=True)
    assert follows(model, given(mask))
    attended.clear()
    model(**given(mask))
    assert set(attended) == {(False, n) for n in lengths}
    assert not report.problems
    valid = " to ".join(map(str, sorted(lengths if name != "one without a key" else {0, 7})))
    (line,) = report.blocks
    assert line.masks == (f"attention by lengths: {valid} of {TOKENS} keys",)


@pytest.mark.parametrize("name", WITH_MASK)
@torch.no_grad()
def test_masks_that_say_more_are_used(name, model, attended, reads):
    report = kw.inject(model, numerics="fused", verify=True)
    assert follows(model, given(WITH_MASK[name]))
    assert set(attended) == {(True, TOKENS)}
    assert not report.problems
    (line,) = report.blocks
    assert line.masks == (MORE,)
    reads.clear()
    assert follows(model, given(WITH_MASK[name]))
    assert reads == []  # reading it would be in vain again


@pytest.mark.parametrize("kernel", ["efficient", "triton"])
@torch.no_grad()
def test_the_numbers_of_a_mask_that_is_used_are_made_once_for_all_blocks(
    kernel, model, monkeypatch
):
    """For kernels that add numbers; others read the truth values."""
    masks, fastest = [], programs.attention

    def noted(query, key, value, mask, *how):
        masks.append(mask)
        return fastest(query, key, value, mask, *how)

    monkeypatch.setattr(programs, "attention", noted)
    monkeypatch.setattr(programs, "kernel_of", lambda *given: kernel)
    kw.inject(model, numerics="fused")
    for mask in (RANDOM, RANDOM.transpose(2, 3), RANDOM):
        assert all(follows(model, given(mask)) for _ in range(2))  # and nothing is compared then
        masks.clear()
        model(**given(mask))
        if kernel == "efficient":
            assert len(masks) == len(model.blocks)
            assert all(m is masks[0] for m in masks)
            assert torch.equal(masks[0][:, :1], added(mask, INFINITY))
        else:
            assert all(m.dtype == torch.bool for m in masks)


@torch.no_grad()
def test_masks_of_all_kinds_in_turn(model):
    kw.inject(model, numerics="fused")
    for mask in (keys(7), keys(12), keys(3)):
        assert follows(model, given(mask))
    mask = pairs(7)
    assert follows(model, given(mask))
    mask.copy_(pairs(9))
    assert follows(model, given(mask))
    mask.data.copy_(pairs(5))  # not counted by the version
    assert follows(model, given(mask))
    mask.copy_(RANDOM)
    assert follows(model, given(mask))
    mask.copy_(pairs(9))
    assert follows(model, given(mask))


@pytest.mark.parametrize("name", BY_LENGTHS)
def test_exact_has_the_bits_of_eager(name, model, attended):
    check_exact(model, given(BY_LENGTHS[name][0]))
    assert attended == []


def by_numbers(monkeypatch):
    """On the CPU only the reading of single numbers is seen."""

    def numbers(facts):
        return [numbers(part) for part in facts] if facts.ndim else facts.item()

    monkeypatch.setattr(attention_by_lengths, "_on_host", numbers)


@torch.no_grad()
def test_graphs_follow_masks_of_other_lengths(model, monkeypatch):
    by_numbers(monkeypatch)
    first, second = given(keys(7)), given(keys(10))
    with graphs_on_the_cpu(), kw.injected(model, numerics="fused", graphs=True) as report:
        for _ in range(3):
            assert follows(model, first)
        (graphs,) = report.graphs
        assert graphs.captured == 1, graphs.reasons
        for _ in range(2):
            assert follows(model, second)
            assert follows(model, first)
        assert set(graphs.reasons) == {OTHER_VALUES}
        assert graphs.captured == 1


@torch.no_grad()
def test_restore_brings_the_mask_back(model, attended):
    expected = run(model, given(keys(7)))
    with kw.injected(model, numerics="fused"):
        run(model, given(keys(7)))
    attended.clear()
    assert same(run(model, given(keys(7))), expected)
    assert attended == []


@pytest.fixture
def windowed(monkeypatch):
    """The windows that attention is told, by a mask in place of the kernel."""
    found = []

    def by_mask(query, key, value, scale, width):
        found.append(width)
        place = torch.arange(query.shape[2])
        mask = window.seen(place, place, width)
        how = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
        return F.scaled_dot_product_attention(query, key, value, mask, **how)

    monkeypatch.setattr(window, "why_not", lambda *heads: None)
    monkeypatch.setattr(window, "flash", by_mask)
    return found


TRIANGLE = keys(TOKENS).expand(1, 1, TOKENS, TOKENS).tril()
WINDOW = TRIANGLE.triu(-4)


@torch.no_grad()
def test_a_window_is_told(model, windowed, attended):
    report = kw.inject(model, numerics="fused", verify=True)
    for mask in (WINDOW, added(WINDOW, INFINITY)):
        assert follows(model, given(mask))
        windowed.clear()
        attended.clear()
        model(**given(mask))
        assert (set(windowed), attended) == ({5}, [])
    assert not report.problems
    (line,) = report.blocks
    assert line.masks == ("attention in a window of 5 keys, without its mask",)
    for other in (WINDOW.triu(-2), keys(7), TRIANGLE, RANDOM, WINDOW):
        assert follows(model, given(other))


@pytest.mark.parametrize("name", ["gemma-3-12b", "phi-3-mini"])
def test_language_models_with_windows(name, windowed):
    model, inputs = built(name, torch.bfloat16, tokens=40)
    model.config.get_text_config().sliding_window = 9
    for layer in model.modules():
        if hasattr(layer, "sliding_window") and layer.sliding_window is not None:
            layer.sliding_window = 9
    check_fused(model, inputs, recipes=False)
    assert set(windowed) == {9}


@torch.no_grad()
@pytest.mark.parametrize("recipes", [True, False])
@pytest.mark.parametrize("family", ["Gemma3", "Mistral"])
def test_a_prompt_with_a_cache_is_told_its_window(family, recipes, windowed, monkeypatch):
    """By a recipe, and by programs, which call the attention function of transformers."""
    monkeypatch.setattr(all_scores, "MIN_QUERIES", 2)
    model = gemma() if family == "Gemma3" else model_of(family, sliding_window=3)
    words = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))

    def prompted(tokens=12):
        found = model(input_ids=words[:, :tokens], use_cache=True)
        cached = [(layer.keys, layer.values) for layer in found.past_key_values.layers]
        return found.logits, cached

    expected, shorter = prompted(), prompted(10)
    with kw.injected(model, numerics="fused", recipes=recipes, verify=True) as report:
        for _ in range(3):
            assert close(prompted(), expected)
        windowed.clear()
        prompted()
        assert set(windowed) == {3}
        assert close(prompted(10), shorter)
    assert not report.problems


def test_exact_is_told_no_window(model, windowed):
    check_exact(model, given(WINDOW))
    assert windowed == []


@pytest.fixture
def windows(monkeypatch):
    """The windows that attention is told, by a kernel that stands in for PyTorch's on a GPU."""
    told = []

    def attend(query, key, value, scale, width):
        told.append(width)
        place = torch.arange(query.shape[2])
        mask = window.seen(place, place, width)
        return F.scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )

    monkeypatch.setattr(window, "why_not", lambda *given: None)
    monkeypatch.setattr(window, "attend", attend)
    return told


@pytest.mark.parametrize("given", [{}, {"attention_mask": torch.ones(2, 7, dtype=torch.long)}])
@torch.no_grad()
def test_a_graph_reads_no_mask_that_is_made_of_no_input(given, windows, reads, monkeypatch):
    by_numbers(monkeypatch)
    model, inputs = gemma(), words(**given)
    with graphs_on_the_cpu(), kw.injected(model, numerics="fused", graphs=True) as report:
        for _ in range(3):
            assert follows(model, inputs)
        (graphs,) = report.graphs
        assert graphs.captured == 1, graphs.reasons
        assert not graphs.reasons
        (known,) = graphs._models.values()
        (graph,) = known.graphs.values()
        assert (graph._reads is None) == (not given)
        assert windows
        if given:
            assert follows(model, words(attention_mask=PADDED))
            assert graphs.reasons

"""Attention by lengths: what masks say, and that attention without them gives the same."""

import pytest
import torch
import torch.nn.functional as F

from kernelwright.fuser import attention_by_lengths
from kernelwright.fuser.attention_by_lengths import MAX_CALLS, Lengths, attend, described, read
from kernelwright.ops.attention import window as window_kernel

TOKENS = 12
MORE = "it says more than lengths"


def valid(*ranges):
    found = torch.zeros(TOKENS, dtype=torch.bool)
    for start, end in ranges:
        found[start:end] = True
    return found


def keys(*samples):
    """[B, 1, 1, N]"""
    return torch.stack([valid(*ranges) for ranges in samples])[:, None, None]


def pairs(*samples):
    """[B, 1, N, N]: valid rows x valid keys."""
    return keys(*samples) & keys(*samples).transpose(2, 3)


def added(mask, hidden=float("-inf"), dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


LEAST = torch.finfo(torch.float32).min
ALL = ((0, TOKENS),)
MASKS = {
    "keys": (keys([(0, 7)]), [(ALL, ((0, 7),))]),
    "keys from the middle": (keys([(3, 7)]), [(ALL, ((3, 7),))]),
    "two ranges": (keys([(0, 2), (5, 12)]), [(ALL, ((0, 2), (5, 12)))]),
    "all": (keys([(0, 12)]), [(ALL, ALL)]),
    "all pairs": (pairs([(0, 12)]), [(ALL, ALL)]),
    "pairs": (pairs([(0, 9)]), [(((0, 9),), ((0, 9),))]),
    "pairs with a gap": (pairs([(0, 2), (4, 12)]), [(((0, 2), (4, 12)), ((0, 2), (4, 12)))]),
    "nothing": (keys([]), [((), ())]),
    "rows": (keys([(0, 4)]).transpose(2, 3), [(((0, 4),), ALL)]),
    "one matrix": (pairs([(0, 9)])[0, 0], [(((0, 9),), ((0, 9),))]),
    "for each head": (keys([(0, 7)]).repeat(1, 2, 1, 1), [(ALL, ((0, 7),))]),
    "expanded": (keys([(0, 7)]).expand(2, 2, TOKENS, TOKENS), [(ALL, ((0, 7),))]),
    "two alike": (keys([(0, 7)], [(0, 7)]), [(ALL, ((0, 7),))]),
    "two": (keys([(0, 7)], [(0, 12)]), [(ALL, ((0, 7),)), (ALL, ALL)]),
    "two, one empty": (pairs([(0, 7)], []), [(((0, 7),), ((0, 7),)), ((), ())]),
    "infinity": (added(pairs([(0, 9)])), [(((0, 9),), ((0, 9),))]),
    "the least number": (added(keys([(0, 9)]), LEAST), [(ALL, ((0, 9),))]),
}
SEPARATE = [(i, i + 1) for i in range(0, TOKENS, 2)]
TRIANGLE = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
TRIANGLES = {
    "one matrix": TRIANGLE[0, 0],
    "expanded": TRIANGLE.expand(2, 2, TOKENS, TOKENS),
    "for each sample": TRIANGLE.repeat(2, 1, 1, 1),
    "infinity": added(TRIANGLE),
    "the least number": added(TRIANGLE, LEAST),
}
NEEDED = {
    "triangle and lengths": TRIANGLE & keys([(0, 9)]),
    "triangle with one more": TRIANGLE.index_put(
        (*torch.tensor([0, 0, 2, 5]),), torch.tensor(True)
    ),
    "triangle with one less": TRIANGLE.index_put(
        (*torch.tensor([0, 0, 5, 2]),), torch.tensor(False)
    ),
    "triangle in one of two": torch.cat([TRIANGLE, TRIANGLE | True]),
    "triangle of other numbers": added(TRIANGLE, -10000.0),
    "triangle from the last row": TRIANGLE.transpose(2, 3),
    "diagonal below": TRIANGLE.tril(-1) | keys([(0, 1)]),
    "one key for hidden rows": pairs([(0, 9)]).index_fill(3, torch.tensor(0), True),
    "heads that differ": torch.cat([keys([(0, 7)]), keys([(0, 8)])], dim=1),
    "too many ranges": keys(SEPARATE),
    "a bias": added(keys([(0, 9)])) + 0.5,
    "a large number": added(keys([(0, 9)]), -10000.0),
    "not a number": added(keys([(0, 9)]), float("nan")),
    "rows hidden by the least number": added(pairs([(0, 9)]), LEAST),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_say_only_lengths(name):
    mask, expected = MASKS[name]
    assert read(mask, TOKENS, TOKENS) == Lengths(tuple(expected), (TOKENS, TOKENS))


@pytest.mark.parametrize("name", TRIANGLES)
def test_masks_that_hide_what_comes_after_a_row(name):
    said = read(TRIANGLES[name], TOKENS, TOKENS)
    assert said == Lengths(((ALL, ALL),), (TOKENS, TOKENS), causal=True)
    assert described(said) == "causal attention without its mask"


def band(window, tokens=TOKENS):
    """Each row sees so many keys up to its own."""
    place = torch.arange(tokens)
    return window_kernel.seen(place, place, window)[None, None]


WINDOWS = {
    "one matrix": (band(5)[0, 0], 5),
    "a key": (band(1), 1),
    "all but one": (band(TOKENS - 1), TOKENS - 1),
    "expanded": (band(5).expand(2, 2, TOKENS, TOKENS), 5),
    "for each sample": (band(5).repeat(2, 1, 1, 1), 5),
    "infinity": (added(band(5)), 5),
    "the least number": (added(band(5), LEAST), 5),
}
NO_WINDOWS = {
    "of other sizes": torch.cat([band(5), band(6)]),
    "with one more": band(5).index_put((*torch.tensor([0, 0, 2, 5]),), torch.tensor(True)),
    "with one less": band(5).index_put((*torch.tensor([0, 0, 5, 2]),), torch.tensor(False)),
    "on both sides": band(5) | band(5).transpose(2, 3),
    "and lengths": band(5) & keys([(2, 12)]),
    "of other numbers": added(band(5), -10000.0),
    "across": band(5).transpose(2, 3),
    "wider at the end": torch.cat([band(5)[:, :, :-1], band(6)[:, :, -1:]], 2),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_masks_that_say_a_window(name):
    mask, width = WINDOWS[name]
    said = read(mask, TOKENS, TOKENS, windows=True)
    assert said == Lengths(((ALL, ALL),), (TOKENS, TOKENS), window=width)
    assert described(said) == f"attention in a window of {width} keys, without its mask"
    assert read(mask, TOKENS, TOKENS) == MORE


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("name", NO_WINDOWS)
def test_masks_that_say_more_than_a_window(name, windows):
    assert read(NO_WINDOWS[name], TOKENS, TOKENS, windows) == MORE


def by_mask(query, key, value, scale, window):
    """In place of the kernel, which needs a GPU."""
    mask = band(window, query.shape[2])
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("name", WINDOWS)
def test_attention_is_told_the_window(name, aligned, monkeypatch):
    """Unless its kernel cannot read the operands."""
    monkeypatch.setattr(window_kernel, "flash", by_mask)
    query, key, value = torch.randn(3, 2, 2, TOKENS, 9)[..., 1:]  # rows begin at odd places
    if aligned:
        query, key, value = (t.contiguous() for t in (query, key, value))
    (mask, _), given = WINDOWS[name], []

    def noted(*args):
        given.append(args[3])
        return attention_by_lengths.plain_attention(*args)

    expected = F.scaled_dot_product_attention(query, key, value, mask, scale=0.3)
    lengths = read(mask, TOKENS, TOKENS, windows=True)
    how = mask, 0.0, False, 0.3, False, (), lengths, expected
    got = attend(query, key, value, *how, by=noted)
    torch.testing.assert_close(got, expected)
    assert [m is mask for m in given] == [True] * (not aligned)


def off_by(number):
    return lambda q, k, v, scale, window: by_mask(q, k, v, scale, window + number)


def without_windows(*given):
    raise RuntimeError("This flash attention build does not support local attention.")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kernel", "right"),
    [(by_mask, True), (off_by(1), False), (off_by(-1), False), (without_windows, False)],
    ids=["right", "one more", "one less", "none"],
)
def test_the_kernel_is_tried_before_it_is_used(kernel, right, dtype, monkeypatch):
    monkeypatch.setattr(window_kernel, "flash", kernel)
    tried = window_kernel._is_right.__wrapped__
    assert tried(torch.device("cpu"), dtype, 64) == right


def test_a_cpu_has_no_kernel_for_windows():
    x = torch.randn(1, 2, TOKENS, 8)
    assert "CUDA" in window_kernel.why_not(x, x, x)


@pytest.mark.parametrize("name", NEEDED)
def test_masks_that_say_more(name):
    assert read(NEEDED[name], TOKENS, TOKENS) == MORE


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("size", [12, 16])  # of a multiple of 8 it reads eight at once
def test_every_element_of_a_mask_counts(size, turned):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ends = torch.randint(1, size + 1, (2,), generator=generator).tolist()
        rows, columns = (torch.arange(size) < end for end in ends)
        mask = (rows[:, None] & columns)[None, None].contiguous()
        if turned:
            mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
        said = (((0, ends[0]),), ((0, ends[1]),))
        assert read(mask, size, size) == Lengths((said,), (size, size))
        for dtype in (torch.float32, torch.bfloat16):
            assert read(added(mask, dtype=dtype), size, size) == Lengths((said,), (size, size))
        at = torch.randint(0, size, (2,), generator=generator).tolist()
        mask[0, 0, at[0], at[1]] ^= True
        kept = mask[0, 0]
        product = kept.any(1)[:, None] & kept.any(0)
        assert isinstance(read(mask, size, size), Lengths) is torch.equal(kept, product)


def test_a_mask_of_one_row_lies_in_memory_as_a_column():
    """A dimension of one element may have any stride, which `is_contiguous` does not ask for."""
    valid = torch.arange(8) < torch.tensor([[5], [6]])
    turned = valid[:, None, :, None].transpose(2, 3)
    assert turned.is_contiguous()
    assert turned.stride(2) == 1
    assert read(turned, 8, 8) == read(valid[:, None, None], 8, 8)


def test_random_masks_are_read_only_if_they_are_rows_times_keys():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rows, columns = (torch.rand(1, 1, 6, generator=generator) > 0.4 for _ in range(2))
        mask = rows[..., None] & columns[..., None, :]
        assert isinstance(read(mask, 6, 6), Lengths)
        place = torch.randint(36, (), generator=generator)
        mask.view(-1)[place] ^= True
        again = mask.any(3, keepdim=True) & mask.any(2, keepdim=True)
        assert isinstance(read(mask, 6, 6), Lengths) == torch.equal(again, mask)


def test_many_samples_of_different_lengths_keep_their_mask():
    mask = keys(*([(0, i + 1)] for i in range(MAX_CALLS + 1)))
    assert read(mask, TOKENS, TOKENS) == f"{MAX_CALLS + 1} samples have different lengths"
    assert isinstance(read(mask[1:], TOKENS, TOKENS), Lengths)


ALL_MASKS = {name: mask for name, (mask, _) in MASKS.items()} | {
    f"triangle, {name}": mask for name, mask in TRIANGLES.items()
}


@pytest.mark.parametrize("few", [0, attention_by_lengths.FEW_ROWS], ids=["without", "with"])
@pytest.mark.parametrize("across", [False, True], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("name", ALL_MASKS)
def test_the_result_is_that_of_the_mask(name, across, few, monkeypatch):
    """Without the rows that see nothing, and with them."""
    monkeypatch.setattr(attention_by_lengths, "FEW_ROWS", few)
    mask = ALL_MASKS[name]
    generator = torch.Generator().manual_seed(0)
    batch = mask.shape[0] if mask.ndim == 4 else 1
    shape = (batch, TOKENS, 2, 8) if across else (batch, 2, TOKENS, 8)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    query, key, value = (t.transpose(1, 2) if across else t for t in drawn)
    if mask.is_floating_point():
        mask = mask.double()
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    given, plain = [], attention_by_lengths.plain_attention

    def without_mask(*args):
        given.append(args[3])
        return plain(*args)

    monkeypatch.setattr(attention_by_lengths, "plain_attention", without_mask)
    lengths = read(ALL_MASKS[name], TOKENS, TOKENS)
    got = attend(query, key, value, mask, 0.0, False, None, False, (), lengths, expected)
    torch.testing.assert_close(got, expected)
    assert torch.equal((got == 0).all(-1), (expected == 0).all(-1))
    assert got.stride() == expected.stride()
    assert given == [None] * len(given)


@pytest.mark.parametrize("name", ["two ranges", "pairs with a gap", "two, one empty"])
def test_what_is_attended_lies_as_all_of_it(name):
    """The heads of a token stay together, so that kernels lay out their result in the same way."""
    mask = MASKS[name][0]
    drawn = torch.randn(3, len(mask), TOKENS, 2, 8)
    query, key, value = drawn.transpose(2, 3)
    given = []

    def noted(*args):
        given.extend(args[:3])
        return attention_by_lengths.plain_attention(*args)

    lengths = read(mask, TOKENS, TOKENS)
    attend(query, key, value, mask, 0.0, False, None, False, (), lengths, query, by=noted)
    assert given
    assert all(t.stride()[1:] == query.stride()[1:] for t in given)


@pytest.mark.parametrize(("few", "queries"), [(2, TOKENS), (1, TOKENS - 2)])
def test_few_rows_that_see_nothing_are_computed_too(few, queries, monkeypatch):
    """To leave them out, all others would be copied twice."""
    monkeypatch.setattr(attention_by_lengths, "FEW_ROWS", few)
    mask = MASKS["pairs with a gap"][0]
    query, key, value = torch.full((3, 1, 2, TOKENS, 8), torch.nan)
    for x in (query, key, value):
        x[:, :, mask[0, 0].any(1)] = torch.randn(TOKENS - 2, 8)
    given = []

    def noted(*args):
        given.append(args[0].shape[2])
        return attention_by_lengths.plain_attention(*args)

    lengths = read(mask, TOKENS, TOKENS)
    got = attend(query, key, value, mask, 0.0, False, None, False, (), lengths, query, by=noted)
    assert given == [queries]
    assert got.isfinite().all()
    assert not got[:, :, 2:4].any()


def test_the_result_is_laid_out_as_it_was_recorded():
    query, key, value = torch.randn(3, 1, 2, TOKENS, 8).unbind(0)
    for name in ("keys", "pairs"):
        mask = MASKS[name][0]
        expected = F.scaled_dot_product_attention(query, key, value, mask)
        like = torch.empty(1, TOKENS, 2, 8).transpose(1, 2)
        assert like.stride() != expected.stride()
        lengths = read(mask, TOKENS, TOKENS)
        got = attend(query, key, value, mask, 0.0, False, None, False, (), lengths, like)
        assert got.stride() == like.stride()
        torch.testing.assert_close(got, expected)


def test_key_heads_that_queries_share():
    query, (key, value) = torch.randn(1, 4, TOKENS, 8), torch.randn(2, 1, 2, TOKENS, 8)
    mask = keys([(0, 7)])
    expected = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    lengths = read(mask, TOKENS, TOKENS)
    got = attend(query, key, value, mask, 0.0, False, None, True, (), lengths, expected)
    torch.testing.assert_close(got, expected)


def test_what_the_report_says():
    said = [described(read(MASKS[name][0], TOKENS, TOKENS)) for name in ("keys", "two")]
    assert said == [
        "attention by lengths: 7 of 12 keys",
        "attention by lengths: 7 to 12 of 12 keys",
    ]
    assert described(MORE) == f"attention with its mask: {MORE}"


def test_heads_that_share_keys_are_said_to_when_the_mask_goes():
    """Without that PyTorch broadcasts them by its slowest way."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, TOKENS, 8, generator=generator)
    key, value = torch.randn(2, 1, 1, TOKENS, 8, generator=generator)
    expected = F.scaled_dot_product_attention(query, key, value, TRIANGLE)
    lengths, given = read(TRIANGLE, TOKENS, TOKENS), []
    plain = attention_by_lengths.plain_attention

    def noted(*args):
        given.append(args[3:])
        return plain(*args)

    how = 0.0, False, None, False, (), lengths, expected
    got = attend(query, key, value, TRIANGLE, *how, by=noted)
    assert given == [(None, 0.0, True, None, True, ())]
    torch.testing.assert_close(got, expected)

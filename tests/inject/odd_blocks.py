"""Blocks of nobody's library that do what few blocks do: each is a usual block with one oddity."""

import torch
import torch.nn.functional as F
from torch import nn

from inject.trained import drawn

WIDTH, HEADS, TOKENS = 32, 2, 7


def counts(block, x, given):
    block.calls += 1
    return x * (1 + block.calls % 3)


def appends(block, x, given):
    block.seen.append(tuple(x.shape))
    return x * len(block.seen)


def writes_to_a_buffer(block, x, given):
    block.total.add_(1)
    return x + block.total * 0.01


def sets_a_buffer(block, x, given):
    block.total = block.total + 1
    return x + block.total * 0.01


def normalises_batches(block, x, given):
    return block.batches(x.transpose(1, 2)).transpose(1, 2)


def normalises_batches_by_a_function(block, x, given):
    held = block.batches.running_mean, block.batches.running_var
    return F.batch_norm(x.transpose(1, 2), *held, training=block.training).transpose(1, 2)


def fills_a_cache(block, x, given):
    if block.cache is None or block.cache.dtype != x.dtype:
        block.cache = torch.full_like(x, 0.3).detach()
    return x + block.cache


def draws(block, x, given):
    return x + 0.1 * torch.randn_like(x)


def reads_a_tensor_that_is_no_buffer(block, x, given):
    return x * block.plain.to(x.dtype)


def branches(block, x, given):
    return x * 2 if x.sum().item() > 0 else x / 2


def writes_in_place(block, x, given):
    y = x * 1.5
    y[..., ::2] *= 2
    y[:, 0] = 0
    return y


def pools(block, x, given):
    """Its result has other strides when it is recorded."""
    return F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)


def looks_at_neighbours(block, x, given):
    return F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1)


def gates_and_normalises(block, x, given):
    a, gate = block.up(x).chunk(2, -1)
    return F.layer_norm(a * F.gelu(gate), (WIDTH,))


def normalises_what_does_not_vary(block, x, given):
    return x * F.layer_norm(x.mean(-1, keepdim=True).expand_as(x), (WIDTH,), block.scale)


def activates_what_is_repeated(block, x, given):
    return x * F.gelu(given["time"][:, None].expand_as(x))


def chooses(block, x, given):
    values, places = x.topk(2, -1)
    return x.scatter(-1, places, values * 2)


def looks_up(block, x, given):
    return x[:, given["places"]] + block.table(given["places"])


def attends_by_hand(block, x, given):
    heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    scores = (heads @ heads.transpose(-1, -2)).masked_fill(~given["mask"][:, None, None], -1e4)
    return (scores.float().softmax(-1).to(x.dtype) @ heads).transpose(1, 2).flatten(2)


def attends_with_a_mask(block, x, given):
    mask = given["mask"][:, None, None] | torch.eye(TOKENS, dtype=torch.bool)
    heads = block.norm(x)[:, None]
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)[:, 0]


def rotates(block, x, given):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * pairs.conj() * 1j).flatten(-2).to(x.dtype)


def reads_its_weight_otherwise(block, x, given):
    return block.down(block.up(x)) @ block.up.weight[:WIDTH] * 0.1


def checkpoints(block, x, given):
    return torch.utils.checkpoint.checkpoint(
        lambda t: block.down(F.silu(block.up(t))), x, use_reentrant=False
    )


ODDITIES = {
    f.__name__: f
    for f in (
        *(counts, appends, writes_to_a_buffer, sets_a_buffer, normalises_batches),
        *(normalises_batches_by_a_function, fills_a_cache, draws, branches, writes_in_place),
        *(pools, looks_at_neighbours, gates_and_normalises, normalises_what_does_not_vary),
        *(activates_what_is_repeated, chooses, looks_up, attends_by_hand, attends_with_a_mask),
        *(rotates, reads_its_weight_otherwise, checkpoints, reads_a_tensor_that_is_no_buffer),
    )
}


class Block(nn.Module):
    def __init__(self, oddity):
        super().__init__()
        self.oddity, self.calls, self.seen, self.cache = oddity, 0, [], None
        self.norm, self.batches = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.table, self.scale = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("total", torch.zeros(1))
        if "no_buffer" in oddity:  # blocks that hold different tensors share no recording
            self.plain = torch.linspace(0.5, 1.5, WIDTH)

    def forward(self, x, **given):
        gate = given["time"][:, None].tanh()
        x = x + gate * self.down(F.gelu(self.up(self.norm(x) * (1 + gate))))
        # by name: what a function of another place does to a block is not seen in its code
        return ODDITIES[self.oddity](self, self.norm(x), given) * 0.5 + x


class Model(nn.Module):
    def __init__(self, oddity):
        super().__init__()
        self.blocks = nn.ModuleList(Block(oddity) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, **given):
        for block in self.blocks:
            x = block(x, **given)
        return self.last(x)


def model(oddity):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(oddity)


def data(dtype=torch.float32):
    return {
        "x": drawn(2, TOKENS, WIDTH).to(dtype),
        "time": drawn(2, WIDTH, seed=1).to(dtype),
        "places": torch.arange(TOKENS).flip(0),
        "mask": drawn(2, TOKENS, seed=2) > -0.5,
    }

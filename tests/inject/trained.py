"""A small model of blocks, and steps of training."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from kernelwright import models

WIDTH, HEADS, TOKENS = 32, 2, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x, text):
        q, k, v = (
            layer(t).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer, t in ((self.q, x), (self.k, text), (self.v, text))
        )
        result = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v)
        return self.o(result.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Reads the text in two places, and the time in three."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.RMSNorm(WIDTH)
        self.attention, self.time = Attention(), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.factor = 1.0

    def forward(self, x, text, time):
        shift, scale, gate = self.time(F.silu(time))[:, None].chunk(3, -1)
        h = self.norm1(x) * (1 + scale) + shift
        x = x + gate * self.attention(h, text)
        h = F.gelu(self.up(self.norm2(x) * (1 + time[:, None].tanh())), approximate="tanh")
        text = text + self.dropout(text.mean(1, keepdim=True)) * time.sigmoid()[:, None]
        return x + self.factor * self.down(h), text


class Model(nn.Module):
    def __init__(self, layers=2, dropout=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.checkpointing = None  # whether with reentry, or None

    def forward(self, x, text, time):
        x = self.first(x)
        for block in self.blocks:
            if self.checkpointing is None:
                x, text = block(x, text, time)
            else:
                x, text = torch.utils.checkpoint.checkpoint(
                    block, x, text, time, use_reentrant=self.checkpointing
                )
        return self.last(x)


def model(**how):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(**how)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def data(seed=0, dtype=torch.float32):
    return {
        "x": drawn(2, TOKENS, 8, seed=seed).to(dtype),
        "text": drawn(2, 5, WIDTH, seed=seed + 1).to(dtype).requires_grad_(),
        "time": drawn(2, WIDTH, seed=seed + 2).to(dtype).requires_grad_(),
    }


def output(result):
    while not isinstance(result, torch.Tensor):
        result = result[0]
    return result


def gradients(trained, inputs, loss=lambda y: y.float().square().mean()):
    """Loss and all gradients, those of inputs too."""
    trained.zero_grad(set_to_none=True)
    for value in inputs.values():
        if isinstance(value, torch.Tensor):
            value.grad = None
    found = loss(output(trained(**inputs)))
    found.backward()
    weights = {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}
    given = {n: t.grad for n, t in inputs.items() if getattr(t, "grad", None) is not None}
    return {"loss": found.detach(), **weights, **given}


def differing(a, b):
    """The names of those that are not the same, bit for bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def with_lora(trained, *layers, **how):
    """The model with adapters around these layers, and all its own weights frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    trained.requires_grad_(False)
    config = LoraConfig(**{"r": 4, "target_modules": list(layers), **how})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return inject_adapter_in_model(config, trained)


# names of layers in the attention of presets
ATTENTION = {"to_q", "to_k", "to_v", "q_proj", "v_proj", "o_proj", "qkv", "qkv_proj", "to_qkv"}


def preset(name, lora, dtype):
    """A tiny model to be trained: all of it, or adapters of its attention."""
    built = models.build(name, tiny=True, dtype=dtype).requires_grad_(True)
    names = {n.rpartition(".")[2] for n, m in built.named_modules() if isinstance(m, nn.Linear)}
    found = ATTENTION & names or {"query_key_value", "to_query", "to_key", "to_value"} & names
    return with_lora(built, *found) if lora else built


def steps(trained, inputs, count):
    """The losses of some steps of AdamW."""
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(count):
        losses.append(gradients(trained, inputs)["loss"])
        optimizer.step()
    return torch.stack(losses)


def twice(trained):
    """The model and a copy of it."""
    return trained, copy.deepcopy(trained)

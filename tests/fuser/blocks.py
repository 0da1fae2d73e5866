"""Modules to fuse: blocks of the presets with the inputs they are given, and small ones of no
library."""

import torch
import torch.nn.functional as F
from torch import nn

from kernelwright import models
from kernelwright.fuser.block_calls import block_calls


def blocks_of(preset, dtype=torch.float32):
    """One block of each class of a model: (module, args, kwargs)."""
    build = {"tiny": True, "device": "cpu", "dtype": dtype}
    return block_calls(models.build(preset, **build), models.inputs(preset, **build))


def drawn(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


class Small(nn.Module):
    """A forward of some tensors, without parameters."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


class Block(nn.Module):
    """A transformer block of no library: adaptive norms, QK-norm, RoPE by halves, SwiGLU."""

    def __init__(self, width=64, heads=2):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x, condition, cos, sin):
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(F.silu(condition)).chunk(6, -1)
        y = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = (rotated_by_halves(n(t), cos, sin) for n, t in ((self.q_norm, q), (self.k_norm, k)))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate[:, None] * self.out(y)
        y = self.norm(x) * (1 + scale2[:, None]) + shift2[:, None]
        a, b = self.up(y).chunk(2, -1)
        return x + gate2[:, None] * self.down(F.silu(a) * b)


def rotated_by_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return (x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]).to(x.dtype)


def rotated_in_pairs(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-b, a], -1).flatten(-2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def rotated_in_place(x, cos, sin):
    """As Wan does it: written into an empty tensor, every second element at a time."""
    a, b = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = a * cos[..., 0::2] - b * sin[..., 1::2]
    out[..., 1::2] = a * sin[..., 1::2] + b * cos[..., 0::2]
    return out


def rotated_as_complex(x, angles):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)

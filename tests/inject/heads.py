"""Small query, key and value projections of one input."""

import torch
from torch import nn

WIDTH = 32


class Heads(nn.Module):
    """Query, key and value of different widths, as in Llama."""

    def __init__(self, bias=True, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, n, bias=bias, dtype=dtype) for n in (WIDTH, 2 * WIDTH, WIDTH)
        )

    @property
    def layers(self):
        return self.q, self.k, self.v

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.layers], -1)


def rows(dtype=torch.float32):
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def is_packed(heads):
    q, k, v = (layer.weight for layer in heads.layers)
    return k.data_ptr() == q.data_ptr() + q.nbytes and v.data_ptr() == k.data_ptr() + k.nbytes

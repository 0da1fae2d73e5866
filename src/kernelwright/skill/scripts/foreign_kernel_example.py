"""A kernel from anywhere as an op of PyTorch: one graph under torch.compile, and a gradient.

    python foreign_kernel_example.py --device cpu

For a kernel that is no op of kernelwright: one of the Hub, of another library, or of your own. Put
its call where `silu_kernel` is. An op of `kernelwright new` has all of this, and tests, already.
"""

import argparse
import os

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def silu_kernel(x, y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + o, mask=o < n, other=0.0).to(tl.float32)
    tl.store(y + o, (b_x * tl.sigmoid(b_x)).to(y.dtype.element_ty), mask=o < n)


# an op writes to none of its arguments, or names those that it does in mutates_args
@torch.library.custom_op("mine::silu", mutates_args=())
def silu(x: Tensor) -> Tensor:
    x = x.contiguous()  # this kernel knows no strides
    y = torch.empty_like(x)
    if x.numel():
        silu_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK)
    return y


@silu.register_fake
def _(x: Tensor) -> Tensor:
    """Shape, strides and dtype of the result, for torch.compile: as above, without computing."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def derived(ctx, grad: Tensor) -> Tensor:
    """In PyTorch ops, float32 inside; or a kernel again, as an op of its own."""
    x = ctx.saved_tensors[0].float()
    s = torch.sigmoid(x)
    return (grad.float() * s * (1 + x * (1 - s))).to(grad.dtype)


silu.register_autograd(derived, setup_context=keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    x = torch.randn(4, 100, device=device, requires_grad=True)
    torch.testing.assert_close(silu(x), torch.nn.functional.silu(x))
    # schema, fake kernel and gradient agree with what the op does
    torch.library.opcheck(silu, (x,))
    compiled = torch.compile(lambda x: silu(x) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), silu(x) + 1)
    (grad,) = torch.autograd.grad(silu(x).sum(), x)
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(x).sum(), x)
    torch.testing.assert_close(grad, expected)
    print("one graph under torch.compile, the right values and gradients")
    raise SystemExit(0)


if __name__ == "__main__":
    main()

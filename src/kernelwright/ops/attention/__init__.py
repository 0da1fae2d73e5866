"""Attention by the fastest kernel that can run a call on this GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...backends.torch_internals import attention_kernels
from .. import checks, selection
from ..composite import Composite
from ..plan_cache import PlanCache, remember
from ..transforms import refuse_kernels, transformed
from . import cases, custom_kernels, reference, sdpa
from .choice import BACKENDS, choose, choose_for, request_of
from .limits import deterministic, left_out

__all__ = ["attention"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    *,
    exact: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """softmax(query @ key^T * scale + mask) @ value, as F.scaled_dot_product_attention.

    Args:
        query: [B, H, Sq, D], float16, bfloat16 or float32; heads before tokens. Any strides; views
            of a packed QKV are read where they lie.
        key: [B, G, Sk, D], H a multiple of G: query heads share key heads in groups of H / G.
        value: [B, G, Sk, Dv].
        mask: broadcastable to [B, H, Sq, Sk]. bool, True where a query sees a key; or float, added
            to the scores. A query that sees no key gives zeros, as in PyTorch from 2.5 on.
        scale: 1 / sqrt(D) if None.
        causal: query i sees keys 0..i, counted from the first, also where Sq != Sk; beside a mask
            both hold.
        exact: "torch" is F.scaled_dot_product_attention itself, with the kernel PyTorch picks.
        backend: "cudnn", "flash", "efficient" or "math" (PyTorch's kernels), "fa4" (flash-attn-4),
            "triton" (ours), "hub" (see `hub.use`), "torch" (PyTorch's pick); None takes the one of
            `use_backend`, or the one that is fastest by `choice.py`. A named one runs or raises.

    Gradients come from PyTorch's kernels: "triton" and "fa4" run the forward themselves, and the
    backward recomputes it through PyTorch's.

    >>> q = torch.ones(1, 1, 2, 4)
    >>> attention(q, q, torch.tensor([[[[1.0], [3.0]]]]), causal=True).flatten()
    tensor([1., 2.])
    """
    if backend is None:
        backend = selection.surrounding()
    if exact is not None:
        checks.choice("attention", "exact", exact, ("torch",))
        backend = "torch"
    if isinstance(query, Tensor) and (query.is_cuda or query.is_cpu):
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            query, key, value, mask = (_cast(t, dtype) for t in (query, key, value, mask))
    if exact is None and isinstance(scale, float | int) and scale < 0:
        # kernels take the maximum of the unscaled scores: make the scale positive
        query, scale = -query, -scale
    args = (query, key, value, mask, scale, causal)
    if not torch.compiler.is_compiling() and transformed(args[:4]):
        return _transformed(*args, backend)
    name = (_checked if torch.compiler.is_compiling() else _kept)(*args, backend)
    if name not in ("torch", "math") and 0 in (query.shape[0], query.shape[1]):
        name = "math"  # no batch or no heads: not every kernel takes empty tensors
    if name in sdpa.KERNELS:
        return sdpa.KERNELS[name](*args)
    return custom_kernels.run(*args, name)


def kernel_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> str:
    """The kernel that `attention` takes for a call, by the names of its backends."""
    return _kept(query, key, value, mask, scale, causal, selection.surrounding())


def _transformed(*values: Any) -> Tensor:
    """A call under torch.func or with tangents: by kernels that PyTorch can transform."""
    _check(*values)
    *args, backend = values
    if backend not in sdpa.KERNELS:
        refuse_kernels("attention", backend)
        backend = "math"
    return sdpa.KERNELS[backend](*args)


def _kept(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
    backend: str,
) -> str:
    """The kernel for a call, cached by everything that decides it: checks and choice run once."""
    grad = torch.is_grad_enabled()
    try:
        signature = (
            (query.shape, query.stride(), query.dtype, query.device),
            (key.shape, key.stride(), key.dtype, key.device),
            (value.shape, value.stride(), value.dtype, value.device),
            # the alignment of the first element, which decides about 16-byte loads
            (query.storage_offset() & 7, key.storage_offset() & 7, value.storage_offset() & 7),
            mask is not None
            and (mask.shape, mask.stride(), mask.dtype, mask.device, grad and mask.requires_grad),
            grad and (query.requires_grad or key.requires_grad or value.requires_grad),
            (scale, causal, backend, deterministic()),
            attention_kernels(),
        )
        name = _choices.get(signature)
    except (AttributeError, RuntimeError, TypeError):
        # not a tensor, no strides, or unhashable: the checks raise an error that names the argument
        _check(query, key, value, mask, scale, causal, backend)
        raise
    if name is None:
        name = _checked(query, key, value, mask, scale, causal, backend)
        remember(_choices, signature, name)
    return name


_choices: PlanCache[str] = {}


def forget() -> None:
    """Clear the cached choices, after something that they depend on has changed."""
    _choices.clear()


@contextmanager
def without_fa4() -> Iterator[None]:
    """Treat flash-attn-4 as not installed, for benchmarks that compare with and without it."""
    left_out.append("fa4")
    forget()
    try:
        yield
    finally:
        left_out.pop()
        forget()


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
    backend: str,
) -> str:
    """Check the arguments and choose the kernel."""
    _check(query, key, value, mask, scale, causal, backend)
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "math"  # an empty tensor: the result is zeros, or empty
    return choose(request_of(query, key, value, mask, causal), backend).backend


def _check(
    query: Any, key: Any, value: Any, mask: Any, scale: Any, causal: Any, backend: Any
) -> None:
    op_name = "attention"
    checks.choice(op_name, "backend", backend, BACKENDS)
    named = {"query": query, "key": key, "value": value}
    for name, t in named.items():
        checks.tensor(op_name, name, t)
        if t.ndim != 4:
            raise ValueError(
                f"attention: {name} has shape {list(t.shape)}, expected [batch, heads, tokens, dim]"
            )
    checks.common(op_name, named)
    batch, heads, queries, head_dim = query.shape
    groups, keys = key.shape[1], key.shape[2]
    for name, t in named.items():
        if t.dtype != query.dtype:
            raise TypeError(f"attention: {name} is {t.dtype}, query is {query.dtype}")
        if t.shape[0] != batch:
            raise ValueError(f"attention: {name} has batch {t.shape[0]}, query has {batch}")
    if head_dim == 0:
        raise ValueError("attention: query has head_dim 0, expected 1 or more")
    if key.shape[3] != head_dim:
        raise ValueError(f"attention: key has head_dim {key.shape[3]}, query has {head_dim}")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"attention: value has {value.shape[1]} heads of {value.shape[2]} tokens, "
            f"key has {groups} of {keys}"
        )
    if heads != groups and (groups == 0 or heads % groups):
        raise ValueError(
            f"attention: query has {heads} heads, expected a multiple of key's {groups}"
        )
    if not isinstance(causal, bool):
        raise TypeError(f"attention: causal is {checks.shown(causal)}, expected True or False")
    if scale is not None:
        checks.finite(op_name, "scale", scale)
    if mask is not None:
        _check_mask(mask, query, (batch, heads, queries, keys))


def _check_mask(mask: Any, query: Tensor, scores: tuple[int, ...]) -> None:
    checks.tensor("attention", "mask", mask)
    accepted = [torch.bool, torch.float16, torch.bfloat16, torch.float32]
    if query.dtype == torch.float64:
        accepted.append(torch.float64)
    if mask.dtype not in accepted:
        raise TypeError(
            f"attention: mask is {mask.dtype}, expected bool (True: seen) or a float to be added"
        )
    if mask.layout != torch.strided:
        raise TypeError(f"attention: mask is {mask.layout}, expected a dense tensor")
    if mask.device != query.device:
        raise ValueError(f"attention: mask is on {mask.device}, query is on {query.device}")
    own = tuple(mask.shape)
    if len(own) > 4 or any(
        n not in (1, m) for n, m in zip(reversed(own), reversed(scores), strict=False)
    ):
        raise ValueError(
            f"attention: mask has shape {list(own)}, expected one that broadcasts to "
            f"[batch, heads, queries, keys] = {list(scores)}"
        )


def _cast(t: Any, dtype: torch.dtype) -> Any:
    """Cast an argument as autocast does for F.scaled_dot_product_attention."""
    wide = isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
    return t.to(dtype) if wide else t


custom_kernels.register_gradient(lambda *args: attention(*args, backend="auto"))

Composite(
    name="attention",
    formula="softmax(query · keyᵀ · scale + mask) · value",
    function=attention,
    reference=reference.attention,
    exact={"torch": sdpa.default},
    cases=cases.ATTENTION,
    backends=("torch", "triton"),
    chooser=choose_for,
    forget=forget,
    describe=lambda query, key, value, mask, _, causal: request_of(query, key, value, mask, causal),
    part=reference.part,
)

"""Plans and choices by the signature of a call: shapes, strides, dtypes, device and plain values.

A cache is a plain dictionary: `get` of a subclass takes 24 ns longer, in every call.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

# a service with ever new sequence lengths starts over here instead of growing without bound
MAX_PLANS = 4096
# tensor types that have a signature; the dispatcher has to see subclasses
PLAIN = frozenset((Tensor, torch.nn.Parameter))

T = TypeVar("T")
PlanCache = dict[Any, T]


def remember(cache: PlanCache[T], key: Any, plan: T) -> T:
    """Put a plan, or a choice, into a cache, which is cleared when it holds MAX_PLANS."""
    if len(cache) >= MAX_PLANS:
        cache.clear()
    cache[key] = plan
    return plan


def layouts(out: Any) -> tuple[Any, ...]:
    """The part of the signature that describes the outputs passed as out=."""
    return tuple(
        None if o is None else (o.shape, o.stride(), o.dtype, o.device, o.is_neg())
        for o in (out if type(out) is tuple else (out,))
    )

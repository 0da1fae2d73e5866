"""Tests of injection leave diffusers and torch.compile as they found them."""

import copy
import sys
from functools import partial

import pytest
import torch

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.reuse import packed_gemm


@pytest.fixture(scope="session", autouse=True)
def tiny_models_drawn_once():
    """A copy of a tiny model takes a third of the time that drawing its weights does."""
    build, built = models.build, {}

    def copied(name, *, tiny=False, **how):
        if not tiny:
            return build(name, **how)
        key = name, *sorted(how.items())
        if key not in built:
            built[key] = build(name, tiny=True, **how)
        return copy.deepcopy(built[key])

    with pytest.MonkeyPatch.context() as session:
        session.setattr(models, "build", copied)
        yield


@pytest.fixture(params=[True, False], ids=["recipes", "programs"])
def either_way(request, monkeypatch):
    """With the recipes of families, and with programs for every block."""
    if not request.param:
        for name in ("inject", "injected"):
            monkeypatch.setattr(kw, name, partial(getattr(kw, name), recipes=False))


@pytest.fixture(autouse=True)
def attention_backend_of_diffusers():
    """`set_attention_backend` of one model sets the backend for all, and resetting the model does
    not undo that."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    before = registry._active_backend
    yield
    registry._active_backend = before


@pytest.fixture(autouse=True)
def nothing_left_compiled():
    """Recompilations for one model count toward the limit of the next one with the same code."""
    yield
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and any(dynamo.counters.values()):
        torch.compiler.reset()
        dynamo.counters.clear()


@pytest.fixture
def other_order(monkeypatch):
    """One GEMM of several layers, with another order of summation."""
    usual = packed_gemm.packed_linear
    monkeypatch.setattr(
        packed_gemm, "packed_linear", lambda x, packed: usual(x, packed) * (1 + 1e-3)
    )

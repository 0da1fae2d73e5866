"""Tests of injection leave diffusers as they found it."""

import pytest

from kernelwright.inject import products


@pytest.fixture(autouse=True)
def attention_backend_of_diffusers():
    """`set_attention_backend` of a model sets it for all, and resetting the model does not undo
    that."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    before = registry._active_backend
    yield
    registry._active_backend = before


@pytest.fixture
def other_order(monkeypatch):
    """One product of several layers, with another order of summation."""
    usual = products.one
    monkeypatch.setattr(products, "one", lambda x, packed: usual(x, packed) * (1 + 1e-3))

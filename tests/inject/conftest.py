"""Tests of injection leave diffusers as they found it."""

import pytest


@pytest.fixture(autouse=True)
def attention_backend_of_diffusers():
    """`set_attention_backend` of a model sets it for all, and resetting the model does not undo
    that."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    before = registry._active_backend
    yield
    registry._active_backend = before

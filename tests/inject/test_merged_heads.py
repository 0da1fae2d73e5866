"""Attention whose queries are stored with the heads of a token together, so that merging the heads
of its result takes no copy: in `exact` only if it then has the same bits."""

import pytest
import torch
from everything import share

import kernelwright as kw
from inject.harness import check_exact, check_fused, run
from kernelwright import models
from kernelwright.inject.reuse import programs

# the language models join the parts of a head that rotate and that do not, the others a text and a
# picture
PRESETS = ["phi-4", "glm-4-9b", "cogvideox-5b", "sd3.5-medium"]


def built(name):
    how = {"tiny": True, "dtype": torch.bfloat16}
    return models.build(name, **how), models.inputs(name, **how)


@pytest.fixture
def attended(monkeypatch):
    """Whether the heads of a token lay together in the queries of each attention."""
    found = []
    for name in ("plain_attention", "attention"):
        own = getattr(programs, name)

        def noted(query, *rest, own=own):
            found.append(query.stride(1) < query.stride(2))
            return own(query, *rest)

        monkeypatch.setattr(programs, name, noted)
    return found


def of_the_last_call(model, inputs, attended, **how):
    with kw.injected(model, recipes=False, **how) as report:
        for _ in range(4):
            attended.clear()
            run(model, inputs)
    assert not report.problems
    assert attended
    return attended


@pytest.mark.parametrize(
    ("name", "numerics"),
    [(p, t) for n, p in enumerate(PRESETS) for t in share(["exact", "fused"], 2, start=n)],
)
def test_heads_lie_together(name, numerics, attended):
    model, inputs = built(name)
    assert all(of_the_last_call(model, inputs, attended, numerics=numerics))
    check = check_exact if numerics == "exact" else check_fused
    check(model, inputs, recipes=False)


@pytest.mark.parametrize("name", PRESETS[:3])
def test_heads_stay_apart_where_another_layout_has_other_bits(name, attended, monkeypatch):
    noted = programs.plain_attention

    def by_layout(query, *rest):
        y = noted(query, *rest)
        return y if query.stride(1) > query.stride(2) else y * 1.01

    monkeypatch.setattr(programs, "plain_attention", by_layout)
    model, inputs = built(name)
    assert not any(of_the_last_call(model, inputs, attended))


def test_numbers_of_the_user_are_not_drawn():
    model, inputs = built("phi-4")
    state = torch.get_rng_state()
    with kw.injected(model):
        run(model, inputs)
    assert torch.equal(torch.get_rng_state(), state)

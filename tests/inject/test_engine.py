"""inject, restore, and the report."""

import copy
import json
import pickle
import threading

import pytest
import torch
from torch import nn

import kernelwright as kw
from inject.harness import check_restored, left_behind, run, same
from kernelwright import models
from kernelwright.inject.fusions import norms as norm_places
from kernelwright.inject.runtime.sites import BackendUnavailable


@pytest.fixture
def ltx():
    build = {"tiny": True, "dtype": torch.bfloat16}
    model, inputs = models.build("ltx-video", **build), models.inputs("ltx-video", **build)
    return model, inputs, run(model, inputs)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return self.layers(x)


def test_nothing_to_replace_is_said():
    report = kw.inject(Plain())
    assert report.replaced == 0
    assert "nothing in it that the kernels could replace" in str(report)


def test_a_target_that_is_no_model():
    with pytest.raises(TypeError, match=r"expected a diffusers pipeline.*nn\.Module"):
        kw.inject("ltx-video")


@pytest.mark.usefixtures("either_way")
def test_twice_then_once_restored(ltx):
    model, inputs, expected = ltx
    kw.inject(model, numerics="fused")
    kw.inject(model)
    assert same(run(model, inputs), expected)
    assert kw.restore(model) > 0
    check_restored(model, inputs, expected)
    assert kw.restore(model) == 0


@pytest.mark.usefixtures("either_way")
def test_state_and_parameters_are_the_same_objects(ltx):
    model, inputs, _ = ltx
    before = {n: id(p) for n, p in model.named_parameters()}
    keys, children = list(model.state_dict()), [set(m.__dict__) for m in model.modules()]
    with kw.injected(model):
        run(model, inputs)
        assert list(model.state_dict()) == keys
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert [set(m.__dict__) for m in model.modules()] == children


def test_contexts_nest(ltx):
    model, inputs, expected = ltx
    with kw.injected(model, numerics="fused"):
        fused = run(model, inputs)
        with kw.injected(model):
            assert same(run(model, inputs), expected)
        assert same(run(model, inputs), fused)
    check_restored(model, inputs, expected)


def test_contexts_closed_out_of_order(ltx):
    model, inputs, expected = ltx
    outer, inner = kw.injected(model, numerics="fused"), kw.injected(model)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert left_behind(model)
    inner.__exit__(None, None, None)
    check_restored(model, inputs, expected)


def test_an_exception_inside_restores(ltx):
    model, inputs, expected = ltx

    def fail():
        with kw.injected(model):
            run(model, inputs)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    check_restored(model, inputs, expected)


@pytest.mark.usefixtures("either_way")
def test_a_failing_forward_leaves_no_trace(ltx):
    model, inputs, expected = ltx
    with kw.injected(model):
        with pytest.raises(Exception, match=r"."):
            run(model, {**inputs, "encoder_hidden_states": torch.zeros(1)})
        assert same(run(model, inputs), expected)


@pytest.mark.compatibility("deepcopy")
@pytest.mark.usefixtures("either_way")
def test_a_copy_is_injected_and_restored_by_itself(ltx):
    model, inputs, expected = ltx
    kw.inject(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.proj_in.weight.mul_(2)
        twin.transformer_blocks[0].attn1.norm_q.weight.mul_(2)
    changed = run(twin, inputs)
    assert not same(changed, expected)
    kw.restore(model)
    check_restored(model, inputs, expected)
    assert left_behind(twin)
    kw.restore(twin)
    check_restored(twin, inputs, changed)


@pytest.mark.usefixtures("either_way")
def test_pickle_gives_a_model_that_runs(ltx):
    model, inputs, expected = ltx
    kw.inject(model)
    loaded = pickle.loads(pickle.dumps(model))
    kw.restore(loaded)
    assert same(run(loaded, inputs), expected)


@pytest.mark.compatibility("save_pretrained")
@pytest.mark.usefixtures("either_way")
def test_saved_and_loaded(ltx, tmp_path):
    model, inputs, expected = ltx
    kw.inject(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert left_behind(loaded) == []
    kw.inject(loaded)
    assert same(run(loaded, inputs), expected)


@pytest.mark.usefixtures("either_way")
def test_another_dtype_afterwards(ltx):
    model, inputs, _ = ltx
    kw.inject(model)
    run(model, inputs)
    model.to(torch.float32)
    wide = {
        k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    result = run(model, wide)
    kw.restore(model)
    assert same(result, run(model, wide))


@pytest.mark.usefixtures("either_way")
def test_weights_changed_in_place_are_seen(ltx):
    model, inputs, expected = ltx
    kw.inject(model)
    run(model, inputs)
    with torch.no_grad():
        for block in model.transformer_blocks:
            block.attn1.norm_k.weight.data.mul_(1.5)
            block.scale_shift_table.data.add_(0.5)
    result = run(model, inputs)
    kw.restore(model)
    assert same(result, run(model, inputs))
    assert not same(result, expected)


@pytest.mark.compatibility("torch.inference_mode")
@pytest.mark.usefixtures("either_way")
def test_inference_mode(ltx):
    model, inputs, expected = ltx
    with kw.injected(model), torch.inference_mode():
        for _ in range(2):
            assert same(model(**inputs), expected)


@pytest.mark.usefixtures("either_way")
def test_two_threads(ltx):
    model, inputs, expected = ltx
    half = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    alone = run(model, half)
    results = {}

    def work(name, given):
        results[name] = [run(model, given) for _ in range(3)]

    with kw.injected(model):
        threads = [
            threading.Thread(target=work, args=("both", inputs)),
            threading.Thread(target=work, args=("half", half)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(same(r, expected) for r in results["both"])
    assert all(same(r, alone) for r in results["half"])


# what differs stays eager


def test_a_kernel_that_differs_stays_eager(ltx, monkeypatch):
    model, inputs, expected = ltx
    right = norm_places.GATED_RESIDUAL_NORM

    def wrong(*args, **kwargs):
        rows, total = right(*args, **kwargs)
        return rows.clone().index_fill_(0, torch.tensor(0), 0), total

    monkeypatch.setattr(norm_places, "GATED_RESIDUAL_NORM", wrong)
    with kw.injected(model) as report:
        with pytest.warns(UserWarning, match=r"transformer_blocks\.0.*residual \+ norm"):
            assert same(run(model, inputs), expected)
        assert same(run(model, inputs), expected)
    assert "residual + norm + modulate differs from eager's" in report.problems[0].problem
    assert report.sites["QK-norm + RoPE"] == {"fused": len(model.transformer_blocks)}
    assert report.sites["residual + norm + modulate"] == {
        "differs from eager's": len(model.transformer_blocks)
    }
    assert "stays eager" in str(report)


def test_what_was_laid_ready_wrongly_is_found(ltx, monkeypatch):
    """Rows computed for the next block are not returned: the next block finds them wrong."""
    model, inputs, expected = ltx
    right = norm_places.GATED_RESIDUAL_NORM

    def wrong(residual, x, gate, *rest, **how):
        rows, total = right(residual, x, gate, *rest, **how)
        return rows if gate is None else rows * 2, total

    monkeypatch.setattr(norm_places, "GATED_RESIDUAL_NORM", wrong)
    with kw.injected(model) as report:
        with pytest.warns(UserWarning, match="computed ahead differs"):
            assert same(run(model, inputs), expected)
        for _ in range(2):
            assert same(run(model, inputs), expected)
    assert [f.module for f in report.problems] == [
        f"transformer_blocks.{i}" for i in range(1, len(model.transformer_blocks))
    ]


def test_a_site_that_no_kernel_serves_is_said(ltx, monkeypatch):
    model, inputs, expected = ltx

    def refuse(*args, **how):
        raise ValueError("no order for this width")

    monkeypatch.setattr(norm_places, "GATED_RESIDUAL", refuse)
    with kw.injected(model) as report:
        for _ in range(2):
            assert same(run(model, inputs), expected)
    assert not report.problems
    assert list(report.sites["gate + residual"]) == ["no order for this width"]


@pytest.mark.usefixtures("either_way")
def test_hooks_inside_run_once_a_forward(ltx):
    model, inputs, _ = ltx
    seen = []
    inner = model.transformer_blocks[0].attn1.to_q
    handle = inner.register_forward_hook(lambda *_: seen.append(1))
    with kw.injected(model):
        run(model, inputs)
    handle.remove()
    assert len(seen) == 1


@pytest.mark.parametrize("numerics", ["exact", "fused"])
def test_code_that_changed_since_the_recipe_stays_eager(ltx, monkeypatch, numerics):
    model, inputs, _ = ltx
    kind = type(model.transformer_blocks[0])
    old = kind.forward

    def forward(self, hidden_states, *args, **kwargs):
        return 2 * old(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    expected = run(model, inputs)
    with kw.injected(model, numerics=numerics) as report, pytest.warns(UserWarning, match="eager"):
        assert same(run(model, inputs), expected) or numerics == "fused"
    assert report.problems


def test_a_forward_replaced_by_somebody_else_is_left_alone(ltx):
    model, inputs, _ = ltx
    block = model.transformer_blocks[0]
    block.forward = lambda hidden_states, **_: hidden_states
    expected = run(model, inputs)
    report = kw.inject(model)
    assert same(run(model, inputs), expected)
    kw.restore(model)
    assert "replaced by something else" in str(report)
    assert left_behind(model) == ["transformer_blocks.0"]


# only, skip, report


def test_only_and_skip(ltx):
    model, inputs, expected = ltx
    with kw.injected(model, only="LTXAttention") as report:
        assert same(run(model, inputs), expected)
    assert report.count("LTXAttention") == 2 * len(model.transformer_blocks)
    assert report.count("LTXVideoTransformerBlock") == 0
    with kw.injected(model, skip=["transformer_blocks.0"]) as report:
        assert same(run(model, inputs), expected)
    assert report.count("LTXVideoTransformerBlock") == len(model.transformer_blocks) - 1
    assert "named by skip" in str(report)
    with pytest.raises(ValueError, match="did you mean 'LTXAttention'"):
        kw.inject(model, skip="LTXAttenton")


def test_wrong_arguments(ltx):
    model, *_ = ltx
    with pytest.raises(ValueError, match="numerics is 'exakt'"):
        kw.inject(model, numerics="exakt")
    with pytest.raises(ValueError, match="cannot fix the order of a sum"):
        kw.inject(model, backend="triton")
    assert left_behind(model) == []


def test_inspect_changes_nothing_and_needs_no_memory():
    model = models.build("ltx-video", device="meta")
    report = kw.inspect(model)
    assert left_behind(model) == []
    assert report.count("LTXVideoTransformerBlock") == 28
    assert "would be replaced" in str(report)


def test_the_report_is_data_too(ltx):
    model, inputs, _ = ltx
    with kw.injected(model) as report:
        run(model, inputs)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["replaced"] == report.replaced
    assert data["sites"]["QK-norm + RoPE"] == {"fused": len(model.transformer_blocks)}
    assert {"kind", "count", "replaced_by", "left_alone"} <= data["modules"][0].keys()


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_backend_asked_for_by_name_raises_on_a_cpu(backend, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).requires_grad_(False)
    with (
        kw.injected(model, numerics="fused", backend=backend),
        pytest.raises(BackendUnavailable, match=f'"{backend}"'),
    ):
        model(torch.randn(2, 64))


def test_a_device_that_is_not_there_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    with pytest.raises(ValueError, match="doctor"):
        kw.inject(model, device="cuda:99")
    assert kw.restore(model) == 0

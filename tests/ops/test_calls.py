"""How an op is called: outputs given, plans kept, backends chosen, dispatch modes heard."""

import contextvars
import threading

import pytest
import torch
from declared import DTYPES, OPS, every_case, every_op, full, small, tensors
from everything import share
from numerics import as_tuple, run
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import kernelwright
from kernelwright import use_backend
from kernelwright.backends.triton import interpreting
from kernelwright.ops import plan_cache
from kernelwright.ops.case import Inputs

BACKENDS = ["torch", *(["triton"] if interpreting() else [])]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
WRITES = [op for op in OPS if not op.inplace]


def equal(got, expected):
    return all(map(torch.equal, as_tuple(got), as_tuple(expected)))


def call_into(op, arguments, outputs, **how):
    return op.call(arguments, out=outputs if len(outputs) > 1 else outputs[0], **how)


def wider(out):
    """An output whose rows lie apart: a slice of a larger tensor."""
    return out.new_empty((*out.shape[:-1], out.shape[-1] + 8))[..., 4:-4]


@every_backend
@pytest.mark.parametrize("make", [torch.empty_like, wider], ids=["dense", "rows apart"])
@every_op(WRITES)
def test_out_is_written_and_returned(op, make, backend):
    arguments = full(op).arguments(Inputs(torch.float32))
    expected = as_tuple(op.call(arguments, backend=backend))
    outputs = tuple(make(e) for e in expected)
    got = as_tuple(call_into(op, arguments, outputs, backend=backend))
    for g, o, e in zip(got, outputs, expected, strict=True):
        assert g is o
        assert torch.equal(o, e)


@every_backend
@every_op([op for op in WRITES if len(op.outputs) > 1])
def test_an_output_not_given_is_made(op, backend):
    arguments = full(op).arguments(Inputs(torch.float32))
    expected = as_tuple(op.call(arguments, backend=backend))
    for i in range(len(expected)):
        outputs = [None] * len(expected)
        outputs[i] = torch.empty_like(expected[i])
        got = op.call(arguments, out=tuple(outputs), backend=backend)
        assert got[i] is outputs[i]
        assert equal(got, expected)


@every_backend
@every_op(WRITES)
def test_out_may_be_the_input_itself(op, backend):
    arguments = full(op).arguments(Inputs(torch.float32))
    expected = as_tuple(op.call(arguments, backend=backend))
    for name, t in tensors(arguments).items():
        if t.shape == expected[-1].shape and t.is_contiguous():
            given = arguments | {name: t.clone()}
            outputs = (*[torch.empty_like(e) for e in expected[:-1]], given[name])
            assert equal(call_into(op, given, outputs, backend=backend), expected), name


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("op", "backend"),
    [(op, "torch") for op in OPS] + [(op, b) for op in share(OPS, 2) for b in BACKENDS[1:]],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_second_call_of_a_signature_computes_its_own_data(op, backend):
    """Every case, dtype and seed in turn: what an earlier call left behind changes nothing."""
    results = {}
    again = (torch.float32, 1), (torch.float16, 0)
    for remembered, drawn in ((True, ((torch.float32, 0), *again)), (False, again)):
        for case in small(op):
            for dtype, seed in drawn:
                if not remembered:
                    op._plans.clear()
                arguments = case.arguments(Inputs(dtype, seed=seed))
                got = op.call(arguments, backend=backend)
                if backend == "torch":
                    assert equal(got, run(op, op.reference, arguments))
                key = case.name, dtype, seed
                assert equal(results.setdefault(key, got), got), key


@every_op(OPS)
def test_the_number_of_plans_kept_is_bounded(op, monkeypatch):
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 6)
    op._plans.clear()
    arguments = full(op).arguments(Inputs(torch.float32))
    names = [n for n, a in arguments.items() if n == "eps"]
    for i, case in enumerate([*small(op)] * 2):
        arguments = case.arguments(Inputs(torch.float32, seed=i))
        arguments |= dict.fromkeys(names, 1e-06 * (i + 1))
        op.call(arguments)
        assert 1 <= len(op._plans) <= 6


def asked(backend=None):
    """The backend that rmsnorm runs on: only "cuda" raises on the CPU."""
    try:
        kernelwright.rmsnorm(torch.ones(1, 8), backend=backend)
    except ValueError as error:
        return "cuda" if "backend 'cuda'" in str(error) else str(error)
    return "other"


class TestUseBackend:
    def test_it_holds_inside_the_block_and_nests(self):
        assert asked() == "other"
        with use_backend("cuda"):
            assert asked() == "cuda"
            with use_backend("torch"):
                assert asked() == "other"
            assert asked() == "cuda"
        assert asked() == "other"

    def test_a_backend_named_in_the_call_wins(self):
        with use_backend("cuda"):
            assert asked("torch") == "other"
        with use_backend("torch"):
            assert asked("cuda") == "cuda"

    def test_it_ends_with_an_exception(self):
        with pytest.raises(KeyError), use_backend("cuda"):
            raise KeyError
        assert asked() == "other"

    def test_another_thread_does_not_see_it(self):
        seen = []
        with use_backend("cuda"):
            thread = threading.Thread(target=lambda: seen.append(asked()))
            thread.start()
            thread.join()
            copied = contextvars.copy_context()
        assert seen == ["other"]
        assert copied.run(asked) == "cuda"


class Heard(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops.append(str(function))
        return function(*args, **kwargs or {})


@every_op(OPS)
def test_a_dispatch_mode_hears_the_op_by_its_name(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    expected = op.call(arguments)
    with Heard() as heard:
        got = op.call(arguments)
    assert heard.ops == [f"kernelwright.{op.name}.default"]
    assert equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@every_case(OPS)
def test_fake_tensors_tell_the_shape_of_the_result(op, case, dtype):
    arguments = case.arguments(Inputs(dtype))
    real = as_tuple(op.call(arguments))
    with FakeTensorMode() as mode:
        fakes = {
            n: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a
            for n, a in arguments.items()
        }
        for f, r in zip(as_tuple(op.call(fakes)), real, strict=True):
            assert (f.shape, f.dtype, f.device) == (r.shape, r.dtype, r.device)
            assert f.stride() == r.stride() or not r.numel()


@every_op(OPS)
def test_a_tensor_subclass_goes_through_the_dispatcher(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    twice = {n: TwoTensor(t, t) for n, t in tensors(arguments).items()}
    got = as_tuple(op.call(arguments | twice))
    for g, e in zip(got, as_tuple(op.call(arguments)), strict=True):
        assert type(g) is TwoTensor
        assert torch.equal(g.a, e)
        assert torch.equal(g.b, e)


@every_op(OPS)
def test_parameters_and_inference_tensors_are_as_good_as_tensors(op):
    arguments = full(op).arguments(Inputs(torch.float32))
    expected = op.call(arguments)
    parameters = {n: torch.nn.Parameter(t, False) for n, t in tensors(arguments).items()}
    assert equal(op.call(arguments | parameters), expected)
    with torch.inference_mode():
        inside = {n: t.clone() for n, t in tensors(arguments).items()}
        assert equal(op.call(arguments | inside), expected)


@every_backend
@every_op(OPS)
def test_an_absent_part_costs_nothing(op, backend, monkeypatch):
    """Nothing stands in for it: no ones, no zeros."""

    def refuse(*_, **__):
        raise AssertionError("a tensor was made to stand in for an absent part")

    cases = [c for c in small(op) if None in c.arguments(Inputs(torch.float32)).values()]
    prepared = [c.arguments(Inputs(torch.float32)) for c in cases]
    for arguments in prepared:
        op.call(arguments, backend=backend)
    for name in ("ones", "ones_like", "zeros", "zeros_like", "full", "full_like"):
        monkeypatch.setattr(torch, name, refuse)
    for arguments in prepared:
        op.call(arguments, backend=backend)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@every_backend
@every_op(OPS)
def test_a_result_is_memory_of_its_own(op, backend):
    for case in small(op):
        arguments = case.arguments(Inputs(torch.float32))
        taken = {t.untyped_storage().data_ptr() for t in tensors(arguments).values()}
        for o in as_tuple(op.call(arguments, backend=backend)):
            assert not o.numel() or o.untyped_storage().data_ptr() not in taken

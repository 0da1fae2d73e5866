"""The library compiled ahead of time as a backend, and the Hub package, on a GPU.

Build the library first, with the shapes of these tests:

    LTX_KERNELS_CASES=all TORCH_CUDA_ARCH_LIST=9.0 \\
        pip install --no-build-isolation ./hub/ltx-kernels-aot
"""

import copy
import statistics

import pytest
import torch
from declared import DTYPES, every_case, every_op, full
from exact_kernels import has_kernel, promotes
from inject.harness import MOST_ERROR, draws, run
from inject.language import model_of, words
from numerics import as_tuple, hold_case

import kernelwright as kw
from kernelwright import hub
from kernelwright.backends import aot
from kernelwright.hub import host_time
from kernelwright.inject.verify import accuracy
from kernelwright.models import presets
from kernelwright.ops.case import Inputs
from kernelwright.ops.op import Op, registry

OPS = [op for op in registry().values() if isinstance(op, Op) and "cuda" in op.backends]
INPLACE = [op for op in OPS if op.inplace]

library = pytest.mark.skipif(not aot.installed(aot.MODULE), reason=f"{aot.MODULE} is not built")


@library
def test_the_library_loads():
    assert aot.problem(torch.device("cuda", 0), torch.bfloat16) is None
    assert aot.kernels()


@library
@pytest.mark.parametrize("dtype", DTYPES)
@every_case(OPS)
def test_a_compiled_kernel_is_as_close_to_float64_as_eager(op, case, dtype):
    hold_case(op, case, dtype, lambda a: op.call(a, backend="aot"), "cuda")


@library
@pytest.mark.parametrize("dtype", DTYPES)
@every_case(OPS)
def test_a_compiled_kernel_gives_the_bits_of_nvrtc(op, case, dtype):
    arguments = case.arguments(Inputs(dtype, "cuda"))
    for exact in (None, *op.exact):
        if exact and (promotes(op, case, exact, dtype) or not has_kernel(op, case, exact, dtype)):
            continue  # an order that has no kernel here, whoever compiles
        want = as_tuple(op.call(arguments, exact=exact, backend="cuda"))
        got = as_tuple(op.call(arguments, exact=exact, backend="aot"))
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), exact


@library
@every_case(INPLACE)
def test_inplace_gives_the_bits_of_a_fresh_output(op, case):
    arguments = case.arguments(Inputs(torch.bfloat16, "cuda"))
    fresh = as_tuple(op.call(arguments, backend="aot"))
    changed = as_tuple(op.call(arguments, backend="aot", inplace=True))
    assert all(torch.equal(f, c) for f, c in zip(fresh, changed, strict=True))


@library
@every_op(OPS)
def test_a_replay_on_new_data_gives_the_bits_of_a_call(op):
    case = full(op)
    first, second = (case.arguments(Inputs(torch.bfloat16, "cuda", seed)) for seed in (0, 1))
    op.call(first, backend="aot")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = as_tuple(op.call(first, backend="aot"))
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            value.copy_(second[name])
    graph.replay()
    for got, want in zip(outs, as_tuple(op.call(second, backend="aot")), strict=True):
        assert torch.equal(got, want)


@library
def test_the_current_stream_is_the_one_that_is_launched_on():
    x = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
    want = kw.rmsnorm(x, torch.ones_like(x[0]), backend="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        late = x * 1
        x_late = kw.rmsnorm(late, torch.ones_like(x[0]), backend="aot")
        assert torch.equal(x_late, want)


@library
def test_a_shape_that_the_library_does_not_hold_is_named():
    x = torch.ones(3, 1234, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"backend 'aot' cannot run this: .*1234"):
        kw.rmsnorm(x, backend="aot")


@library
def test_host_time_stands_beside_the_others():
    op = registry()["rmsnorm"]
    row = host_time.measure(op, next(c for c in op.cases if c.large), seconds=0.05)
    assert set(row["host_us"]) == {host_time.EAGER, *host_time.BACKENDS}
    assert all(us > 0 for us in row["host_us"].values())


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    pytest.importorskip("kernels")
    folder = tmp_path_factory.mktemp("hub")
    hub.build(folder, ["torch-cuda"])
    return folder


def test_the_hub_package_runs_triton_kernels_with_the_bits_of_ours(package):
    from kernels import get_local_kernel

    theirs = get_local_kernel(package).registry()
    for op in OPS:
        arguments = full(op).arguments(Inputs(torch.bfloat16, "cuda"))
        got, want = (as_tuple(o.call(arguments, backend="triton")) for o in (theirs[op.name], op))
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), op.name


@pytest.mark.parametrize("name", ["ltx-video", "llama-3-8b"])
def test_a_kernelized_model_errs_no_more_than_eager(package, name):
    from kernels import Mode

    preset = presets()[name]
    model = preset.build(tiny=True, dtype=torch.bfloat16, device="cuda")
    inputs = preset.inputs(tiny=True, dtype=torch.bfloat16, device="cuda")
    ours = hub.kernelize(copy.deepcopy(model), mode=Mode.INFERENCE, package=package)
    errs_no_more_than_eager(ours, model, inputs)


@pytest.mark.parametrize("route", ["kernelize", "KernelConfig"])
def test_a_gemma_with_layers_of_the_package_errs_no_more_than_eager(package, route):
    from kernels import Mode, get_local_kernel
    from transformers.utils import is_kernels_available

    if route == "KernelConfig" and not is_kernels_available():
        pytest.skip("this version of transformers takes another one of kernels")
    model = model_of("Gemma", torch.bfloat16).cuda()
    inputs = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in words().items()}
    ours = copy.deepcopy(model)
    if route == "kernelize":
        hub.kernelize(ours, mode=Mode.INFERENCE, package=package)
        name, changed = "GemmaMLP", ours.model.layers[0].mlp
    else:
        ours.set_use_kernels(True, hub.kernel_config(package))
        name, changed = "ExactGeluTanh", ours.model.layers[0].mlp.act_fn
    assert changed.forward.__func__ is getattr(get_local_kernel(package).layers, name).forward
    errs_no_more_than_eager(ours, model, inputs)


def errs_no_more_than_eager(ours, model, inputs):
    wide = torch.nn.Module.float(copy.deepcopy(model))
    ratios = []
    for given in draws(inputs):
        truth = run(wide, accuracy.widened(given))
        eager, got = (accuracy.error(run(m, given), truth) for m in (model, ours))
        ratios.append(got / eager)
    assert statistics.geometric_mean(ratios) <= MOST_ERROR, ratios

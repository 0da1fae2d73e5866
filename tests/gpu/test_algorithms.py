"""linear has the bits of F.linear by whichever algorithm of cuBLASLt it takes, on a GPU."""

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F

from kernelwright.backends.cache import KernelCache
from kernelwright.ops.linear import algorithms, choosing, configurations, cublaslt, kept_choices
from kernelwright.ops.linear.algorithms import linear
from kernelwright.ops.linear.plain import plain

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() != (9, 0), reason="algorithms are chosen on capability 9.0"
)

# rows, width, outputs, bias
SHAPES = {
    "llama gate and up": ((4096,), 4096, 28672, False),
    "llama qkv": ((1, 4096), 4096, 6144, False),
    "ltx qkv": ((5376,), 2048, 6144, True),
    "ltx qkv in batches": ((2, 2688), 2048, 6144, True),
    "ltx first": ((5376,), 2048, 8192, True),
    "flux last": ((4608,), 15360, 3072, True),
    "few rows": ((512,), 15360, 3072, True),
    "odd sizes": ((2563,), 2056, 6152, True),
}


@pytest.fixture(autouse=True)
def another_algorithm(monkeypatch):
    """Whatever is tried and has the bits is taken, faster or not."""
    monkeypatch.setattr(choosing, "GAIN", 0)
    algorithms.forget()
    with torch.no_grad():
        yield
    algorithms.forget()


def random(*shape, seed=0, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def operands(rows, width, outputs, bias, seed=0, dtype=torch.bfloat16):
    weight = random(outputs, width, seed=seed + 1, dtype=dtype, scale=width**-0.5)
    b = random(outputs, seed=seed + 2, dtype=dtype) if bias else None
    return random(*rows, width, seed=seed, dtype=dtype), weight, b


def chosen():
    """The only decision, which is for another algorithm."""
    (decision,) = algorithms.decisions()
    assert decision.way is not None, str(decision)
    return decision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_new_data_has_the_bits_of_linear(name, dtype):
    linear(*operands(*SHAPES[name], dtype=dtype))
    chosen()
    for seed in (10, 20):
        given = operands(*SHAPES[name], seed=seed, dtype=dtype)
        got, expected = linear(*given), F.linear(*given)
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()


@pytest.mark.parametrize("name", SHAPES)
def test_what_an_earlier_process_chose_is_compared_and_taken(name, monkeypatch, tmp_path):
    kept = KernelCache(tmp_path / "kept")
    monkeypatch.setattr(kept_choices, "cache", lambda: kept)
    linear(*operands(*SHAPES[name]))
    first = chosen()
    algorithms.forget()
    monkeypatch.setattr(choosing, "_forgotten", False)  # as a process that begins
    monkeypatch.setattr(choosing, "readings", None)  # nothing is timed again
    given = operands(*SHAPES[name], seed=10)
    for _ in range(2):
        assert torch.equal(linear(*given), F.linear(*given))
    assert bytes(chosen().way.found.algorithm) == bytes(first.way.found.algorithm)
    assert chosen().us == first.us


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["ltx first", "few rows", "odd sizes"])
def test_new_data_has_the_bits_of_gelu_in_pytorchs_epilogue(name, dtype):
    linear(*operands(*SHAPES[name], dtype=dtype), gelu=True)
    chosen()
    given = operands(*SHAPES[name], seed=10, dtype=dtype)
    assert torch.equal(linear(*given, gelu=True), plain(*given, gelu=True))


def test_configurations_that_are_not_named_take_part_where_they_were_tried():
    x, weight, bias = operands(*SHAPES["ltx first"])
    shape = choosing._shape(x, weight, bias, False, F.linear(x, weight, bias))
    product = cublaslt.Product(choosing._library(0), shape)
    functions = product.library.functions
    asked = {
        configurations.of(functions, a.found) for a in product.algorithms(bias.data_ptr())
    } & set(configurations.MORE)
    tried = {(t.version, t.capability) for t in configurations.TRIED}
    if (functions.cublasLtGetVersion(), (9, 0)) in tried:
        assert asked >= {configurations.MORE[0], configurations.MORE[1]}
        assert algorithms.unnamed(x.device).endswith("are tried")
    else:
        assert not product.library.asks
        assert "was not tried" in algorithms.unnamed(x.device)


# asks although this cuBLASLt may be new. what it prints is what a row of TRIED has to say
ASKING = """
import torch
from kernelwright.ops.linear import choosing, configurations, cublaslt
library = choosing._library(0)
library.asks = True
sizes = torch.Generator().manual_seed(0)

def size(most):
    return 8 * int(torch.randint(1, most // 8, (), generator=sizes))

asked = set()
for number in range(300):
    rows, outputs, width = size(40_000), size(30_000), size(20_000)
    dtype = (torch.bfloat16, torch.float16)[number % 2]
    how = {"biased": number % 3 > 0, "gelu": number % 3 > 1}
    x_stride = weight_stride = width
    if number % 3 == 0:  # the products of a backward have no bias
        how |= {"x_across": number % 2 > 0, "weight_across": True}
        rows += 1
        x_stride, weight_stride = rows if number % 2 else width, outputs
    shape = cublaslt.Shape(rows - 1, outputs, width, x_stride, weight_stride, dtype, **how)
    found = cublaslt.Product(library, shape).algorithms(256 if how["biased"] else 0)
    assert found
    asked |= {configurations.of(library.functions, a.found) for a in found}
assert asked >= set(configurations.MORE[:2]), asked
print("asked", library.functions.cublasLtGetVersion(), torch.cuda.get_device_capability())
"""


def test_whatever_the_sizes_it_can_be_asked_for_them():
    """With some configurations cuBLASLt divides by zero when it is asked; not with these. In a
    process of its own, for that would end this one."""
    done = subprocess.run(
        [sys.executable, "-c", ASKING], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.startswith("asked ")


def test_every_algorithm_that_agreed_once_agrees_on_other_data(monkeypatch):
    ways = []

    def remembered(algorithm, x, weight):
        ways.append(way := Way(algorithm, x, weight))
        return way

    Way = choosing.Way
    monkeypatch.setattr(choosing, "Way", remembered)
    given = operands(*SHAPES["ltx qkv"])
    linear(*given)
    expected = F.linear(*given)
    out = torch.empty_like(expected)

    def agrees(way, given, expected):
        out.fill_(torch.nan)
        return way.into(out, *given) == 0 and torch.equal(out, expected)

    agreed = [way for way in ways if agrees(way, given, expected)]
    assert agreed
    others = operands(*SHAPES["ltx qkv"], seed=30)
    expected = F.linear(*others)
    assert all(agrees(way, others, expected) for way in agreed)


def test_rows_that_lie_apart_are_read_where_they_are():
    weight = random(6144, 4096)
    for seed in (1, 2):
        x = random(4096, 3 * 4096, seed=seed)[:, 4096:8192]
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    chosen()


def test_a_graph_holds_the_algorithm_and_reads_new_data():
    x, weight, bias = operands(*SHAPES["ltx qkv in batches"])
    linear(x, weight, bias)
    way, launches = chosen().way, []
    launch = way._launch
    way._launch = lambda *addresses: launches.append(addresses) or launch(*addresses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight, bias)
    assert len(launches) == 1
    for seed in (5, 6):
        x.copy_(random(*x.shape, seed=seed))
        graph.replay()
        assert torch.equal(out, F.linear(x, weight, bias))


def test_a_graph_of_a_product_that_is_new_is_that_of_linear():
    x, weight, bias = operands(*SHAPES["ltx qkv"])
    expected = F.linear(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight, bias)
    assert not algorithms.decisions()
    graph.replay()
    assert torch.equal(out, expected)


def test_threads_and_streams_do_not_get_in_each_others_way():
    x, weight, _ = operands(*SHAPES["ltx qkv"])
    biases = [random(6144, seed=seed) for seed in range(4)]
    linear(x, weight, biases[0])
    chosen()
    inputs = [random(*x.shape, seed=seed) for seed in range(4)]
    expected = [F.linear(x, weight, bias) for x, bias in zip(inputs, biases, strict=True)]
    torch.cuda.synchronize()
    wrong, begin = [], threading.Barrier(4)

    def ask(i):
        begin.wait()
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            got = [linear(inputs[i], weight, biases[i]) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
            wrong.extend(i for y in got if not torch.equal(y, expected[i]))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    chosen()


def test_each_bias_is_added_to_its_own_product():
    x, weight, _ = operands(*SHAPES["ltx qkv"])
    for seed in (1, 2, 1, 3):
        bias = random(6144, seed=seed)
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    chosen()


def test_choosing_is_short_and_keeps_no_memory():
    given = operands(*SHAPES["llama gate and up"])
    linear(*given)  # loads the kernels
    algorithms.forget()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    linear(*given)
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 0.15
    chosen()
    assert torch.cuda.memory_allocated() == before


def test_torch_compile_sees_linear_itself():
    x, weight, bias = operands(*SHAPES["ltx qkv"])
    linear(x, weight, bias)
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, weight, bias), F.linear(x, weight, bias))


# of a gradient [rows, outputs] by a weight [outputs, width], and of it transposed by an activation
BACKWARDS = {
    "ltx last": (5376, 8192, 2048),
    "flux": (4608, 3072, 12288),
    "llama": (4096, 4096, 14336),
}


@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.parametrize("of_weight", [False, True])
def test_new_data_has_the_bits_of_the_products_of_a_backward(name, of_weight):
    rows, width, outputs = BACKWARDS[name]

    def drawn(seed):
        gradient = random(rows, outputs, seed=seed)
        if of_weight:
            return gradient.t(), random(rows, width, seed=seed + 1)
        return gradient, random(outputs, width, seed=seed + 1)

    algorithms.mm(*drawn(0))
    chosen()
    for seed in (10, 20):
        given = drawn(seed)
        got, expected = algorithms.mm(*given), torch.mm(*given)
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()

"""linear: F.linear's bits, by the fastest algorithm of cuBLASLt that has them."""

import threading

import pytest
import torch
import torch.nn.functional as F
from cublaslt_on_cpu import NOT_SUPPORTED, Known, decided, operands

from kernelwright.ops.linear import algorithms, choosing, configurations, cublaslt
from kernelwright.ops.linear.algorithms import linear
from kernelwright.ops.linear.configurations import Configuration
from kernelwright.ops.linear.plain import plain, plain_into

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(6,), (2, 3), (2, 1, 3)])
def test_the_fastest_algorithm_computes_later_calls_and_gives_the_bits_of_linear(
    pretend, rows, bias, dtype
):
    library = pretend(Known(100), Known(80, workspace=512), Known(90))
    x, weight, b = operands(rows, bias=bias, dtype=dtype)
    assert torch.equal(linear(x, weight, b), F.linear(x, weight, b))
    library.launched.clear()
    other, weight, b = operands(rows, bias=bias, dtype=dtype)
    got = linear(other, weight, b)
    assert library.launched == [(1, None if b is None else b.data_ptr())]
    expected = F.linear(other, weight, b)
    assert torch.equal(got, expected)
    assert got.stride() == expected.stride()
    assert (decided().torch_us, decided().us) == (100, 80)


def test_an_algorithm_with_other_bits_is_never_taken_however_fast(pretend):
    library = pretend(Known(10, adds=0.5), Known(90))
    x, weight, bias = operands()
    linear(x, weight, bias)
    linear(x, weight, bias)
    assert library.launched[-1][0] == 1
    pretend(Known(10, adds=0.5))
    linear(x, weight, bias)
    assert decided().way is None
    assert "none of 1 others gives its bits" in algorithms.describe()


def test_a_result_that_was_not_written_is_no_result(pretend):
    library = pretend(Known(90), Known(10))
    compute = library._columns

    def written_by_the_first_alone(at, layout):
        matrix = compute(at, layout)
        return matrix if library.ran == 0 else matrix.clone()

    library._columns = written_by_the_first_alone
    x, weight, bias = operands()
    linear(x, weight, bias)
    linear(x, weight, bias)
    assert library.launched[-1][0] == 0


def test_less_than_a_percent_is_no_reason(pretend):
    library = pretend(Known(99.5), Known(99.2))
    x, weight, bias = operands()
    for _ in range(2):
        linear(x, weight, bias)
    assert decided().way is None
    before = len(library.launched)
    linear(x, weight, bias)
    assert len(library.launched) == before
    assert "1% faster" in algorithms.describe()


def test_ways_are_timed_in_turns_and_by_their_medians(monkeypatch):
    clock, order = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    def way(name, *milliseconds):
        each = iter(milliseconds)

        def run():
            order.append(name)
            clock[0] += next(each)

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    # the first of all only gives the host a start
    ways = [way("a", 50, 3, 9, 4), way("b", 2, 1, 7)]
    assert choosing.readings(ways, 3) == [pytest.approx(4e3), pytest.approx(2e3)]
    assert order == list("aababab")


def test_what_needs_less_power_is_taken_though_it_reads_slower(pretend):
    """A model keeps the GPU at its power limit, where small tiles lose what they gain before."""
    mine, small = Configuration(24, 7, 5), Configuration(20, 1, 3)
    library = pretend(
        Known(100, of=mine), Known(95, of=small), Known(97, of=configurations.MORE[0])
    )
    x, weight, bias = operands()
    for _ in range(2):
        linear(x, weight, bias)
    assert library.launched[-1][0] == 2
    power = configurations.POWER
    assert decided().us == pytest.approx(97 * power[configurations.MORE[0]] / power[mine])
    # in another version the numbers may mean other kernels
    library = pretend(Known(100, of=mine), Known(95, of=small), version=130_200)
    for _ in range(2):
        linear(x, weight, bias)
    assert library.launched[-1][0] == 1
    assert decided().us == 95


def test_zeros_decide_nothing_but_that(pretend):
    library = pretend(Known(10, adds=0))
    x, weight, bias = operands()
    linear(torch.zeros_like(x), weight, bias)
    assert not library.launched
    assert "zeros" in decided().why


@pytest.mark.parametrize(("part", "tells"), [(8, True), (20, False)])
@pytest.mark.parametrize("which", ["x", "weight"])
def test_an_operand_of_which_few_elements_are_not_zero_decides_nothing(pretend, which, part, tells):
    library = pretend(Known(10))
    given = dict(zip(("x", "weight", "bias"), operands((20,), width=40), strict=True))
    given[which].view(-1)[torch.arange(given[which].numel()) % part > 0] = 0
    linear(**given)
    assert bool(library.launched) is tells
    assert ("zeros" in decided().why) is not tells


def test_what_cublaslt_could_not_do_is_left_out(pretend):
    library = pretend(Known(10, status=NOT_SUPPORTED), Known(90))
    x, weight, bias = operands()
    for _ in range(2):
        linear(x, weight, bias)
    assert {number for number, _ in library.launched} == {1}


def test_a_long_product_is_tried_in_fewer_ways_or_in_none(pretend):
    x, weight, bias = operands()
    # 3 x (itself and 8 others) of 5 ms each are 27 calls
    library = pretend(*(Known(4_000) for _ in range(12)), torch_us=5_000)
    linear(x, weight, bias)
    assert {number for number, _ in library.launched} == set(range(8))
    # 3 x (itself and 2 others) of 20 ms each are less than 200 ms, with 3 they are more
    library = pretend(*(Known(19_000) for _ in range(12)), torch_us=20_000)
    linear(x, weight, bias)
    assert {number for number, _ in library.launched} == {0, 1}
    library = pretend(Known(10_000), torch_us=40_000)
    linear(x, weight, bias)
    assert not library.launched
    assert "too long" in decided().why


def test_while_a_graph_is_captured_nothing_is_tried_and_what_was_chosen_runs(pretend, monkeypatch):
    library = pretend(Known(10))
    x, weight, bias = operands()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    linear(x, weight, bias)
    assert not library.launched
    assert not algorithms.decisions()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    linear(x, weight, bias)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = len(library.launched)
    linear(x, weight, bias)
    assert len(library.launched) == before + 1


def test_each_bias_is_added_to_its_own_product(pretend):
    library = pretend(Known(10))
    x, weight, first = operands()
    second = torch.randn_like(first)
    linear(x, weight, first)
    made = library.made
    for bias in (first, second, first, second):
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
        assert library.launched[-1][1] == bias.data_ptr()
    assert library.made == made + 1  # the second's description


def test_descriptions_of_biases_that_came_and_went_are_given_back(pretend, monkeypatch):
    library = pretend(Known(10))
    monkeypatch.setattr(cublaslt, "BIASES", 4)
    x, weight, bias = operands()
    biases = [torch.randn_like(bias) for _ in range(12)]
    for b in (bias, *biases):
        assert torch.equal(linear(x, weight, b), F.linear(x, weight, b))
    # a handle, three layouts, descriptions of biases
    assert len(library.things) <= 4 + 4
    algorithms.forget()
    assert len(library.things) == 1


def test_rows_may_lie_apart(pretend):
    library = pretend(Known(10, workspace=64))
    weight = torch.randn(16, 96, dtype=torch.bfloat16)[:, :32]
    for _ in range(2):
        x = torch.randn(2, 3, 64, dtype=torch.bfloat16)[..., :32]
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert library.launched[-1][0] == 0
    assert decided().way is not None


def test_two_threads_may_ask_at_once(pretend):
    library = pretend(Known(10))
    x, weight, bias = operands()
    compute, meeting = library.cublasLtMatmul, None

    def together(*arguments):
        if meeting is not None:
            meeting.wait(10)  # both have told what they want before either is computed
        return compute(*arguments)

    library.cublasLtMatmul = together
    linear(x, weight, bias)
    linear(x, weight, bias)
    meeting, wrong, before = threading.Barrier(2), [], len(library.launched)

    def ask(mine):
        for _ in range(5):
            if not torch.equal(linear(mine, weight, bias), F.linear(mine, weight, bias)):
                wrong.append(mine)

    threads = [threading.Thread(target=ask, args=(torch.randn_like(x),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # the first of each thread is F.linear's, which readies it
    assert len(library.launched) == before + 2 * 4


def test_a_switch_that_changes_the_bits_of_linear_asks_anew(pretend, monkeypatch):
    pretend(Known(10))
    x, weight, bias = operands()
    linear(x, weight, bias)
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = not allowed
        linear(x, weight, bias)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = allowed
    linear(x, weight, None)
    linear(x[:4], weight, bias)
    linear(x, weight, bias)
    assert len(algorithms.decisions()) == 4


def test_another_number_of_rows_tries_the_winner_alone(pretend):
    library = pretend(Known(100), Known(60), Known(80))
    _, weight, bias = operands()
    for rows, tried in ((8, {0, 1, 2}), (12, {1}), (100, {0, 1, 2})):
        library.launched.clear()
        x = torch.randn(rows, 32, dtype=torch.bfloat16)
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
        assert {number for number, _ in library.launched} == tried
    library.launched.clear()
    linear(torch.randn(9, 32, dtype=torch.bfloat16), weight, None)  # another epilogue
    assert len({number for number, _ in library.launched}) == 3


def test_where_none_was_faster_another_number_of_rows_tries_none(pretend):
    library = pretend(Known(100), Known(99.5))
    _, weight, bias = operands()
    linear(torch.randn(8, 32, dtype=torch.bfloat16), weight, bias)
    library.launched.clear()
    linear(torch.randn(9, 32, dtype=torch.bfloat16), weight, bias)
    assert not library.launched
    assert "none was faster for 8 rows either" in algorithms.describe()


def test_gelu_in_the_epilogue_has_algorithms_of_its_own(pretend):
    library = pretend(Known(100), Known(80))
    x, weight, bias = operands((2, 3))
    expected = torch._addmm_activation(bias, x.view(6, 32), weight.t(), use_gelu=True)
    for _ in range(2):
        assert torch.equal(linear(x, weight, bias, gelu=True), expected.view(2, 3, 16))
    assert library.launched[-1] == (1, bias.data_ptr())
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert len(algorithms.decisions()) == 2
    assert ", GELU in bfloat16" in str(algorithms.decisions()[0])


def test_the_report_counts_and_names(pretend):
    pretend(Known(80))
    x, weight, bias = operands()
    linear(x, weight, bias)
    linear(x.float(), weight.float(), bias.float())
    line = algorithms.describe()
    assert line.startswith("1 of 2 products by another algorithm than PyTorch's, 1.25 to 1.25")
    assert str(algorithms.decisions()[0]) == (
        "6 x 32 to 16 + bias in bfloat16: 80 us, 100 by PyTorch's algorithm"
    )


def test_a_search_that_fails_is_no_reason_for_a_product_to_fail(pretend, monkeypatch):
    pretend(Known(80))

    def broken(*_):
        raise RuntimeError("no such thing\nat all")

    monkeypatch.setattr(choosing, "plain_into", broken)
    x, weight, bias = operands()
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert decided().why == "trying others failed: no such thing"


@pytest.mark.parametrize("how", ["bare", "bias", "gelu"])
def test_torch_gives_the_same_in_memory_that_is_there(how):
    # whole numbers, whose sums are exact in any order: on a CPU these are other kernels
    x, weight, b = (t.mul(2).round().clamp(-2, 2) for t in operands((2, 3)))
    bias = None if how == "bare" else b
    expected = plain(x, weight, bias, how == "gelu")
    out = torch.empty_like(expected)
    plain_into(out, x, weight, bias, how == "gelu")
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("a_across", "b_across"), [(False, False), (True, False), (False, True)])
def test_a_product_of_matrices_that_lie_across(pretend, a_across, b_across, dtype):
    """Those of a backward: a gradient by a weight, and a transposed gradient by an activation."""
    library = pretend(Known(100), Known(80))

    def drawn(rows, columns, across):
        return (
            torch.randn(columns, rows, dtype=dtype).t()
            if across
            else torch.randn(rows, columns, dtype=dtype)
        )

    for _ in range(2):
        a, b = drawn(24, 40, a_across), drawn(40, 16, b_across)
        got, expected = algorithms.mm(a, b), torch.mm(a, b)
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()
    assert library.launched[-1] == (1, None)


def test_a_matrix_with_gaps_both_ways_is_left_to_pytorch(pretend):
    pretend(Known(10))
    b = torch.randn(80, 64).bfloat16()[::2, ::2]
    a = torch.randn(24, 40).bfloat16()
    assert torch.equal(algorithms.mm(a, b), torch.mm(a, b))
    assert "gaps" in decided().why


CHANGES = {
    "another layout of the rows": lambda x, w, b: (torch.randn(32, 6).bfloat16().t(), w, b),
    "more rows": lambda x, w, b: (x.repeat(2, 1), w, b),
    "another layout of the weight": lambda x, w, b: (x, torch.randn(32, 16).bfloat16().t(), b),
    "no bias": lambda x, w, b: (x, w, None),
    "another dtype": lambda x, w, b: (x.half(), w.half(), b.half()),
    "no multiple of an address": lambda x, w, b: (torch.cat([x, x])[1:7], w, b),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["a parameter", "a call site"])
def test_a_call_unlike_the_one_before_is_computed_as_it_is_given(pretend, kind, change):
    pretend(Known(100), Known(80))
    x, weight, bias = operands()
    site = algorithms.CallSite()

    def multiplied(x, weight, bias):
        if kind == "a call site":
            return site(x, weight, bias)
        layer.data = weight  # the same object, elsewhere
        return linear(x, layer, bias)

    layer = torch.nn.Parameter(weight, False)
    other = CHANGES[change](x, weight, bias)
    for given in [(x, weight, bias)] * 3 + [other, (x, weight, bias), other]:
        expected = F.linear(*given)
        got = multiplied(*given)
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()


def test_a_switch_of_pytorch_is_noticed_at_a_place_that_remembers(pretend):
    library = pretend(Known(100), Known(80))
    x, weight, bias = operands()
    site = algorithms.CallSite()
    for _ in range(2):
        site(x, weight, bias)
    tried = len(library.launched)
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        site(x, weight, bias)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = True
    assert len(library.launched) > tried + 1  # algorithms are tried again


@pytest.mark.parametrize("a_across", [False, True])
def test_a_place_that_multiplies_matrices(pretend, a_across):
    library = pretend(Known(100), Known(80))
    site = algorithms.CallSite(transposed=True)
    for _ in range(4):
        a, b = torch.randn(24, 40).bfloat16(), torch.randn(40, 16).bfloat16()
        a = a.t().contiguous().t() if a_across else a
        assert torch.equal(site(a, b), torch.mm(a, b))
    assert library.launched[-1] == (1, None)


def test_a_place_whose_algorithm_fails_takes_pytorchs(pretend):
    library = pretend(Known(100), Known(80))
    x, weight, bias = operands()
    site = algorithms.CallSite()
    for _ in range(2):
        site(x, weight, bias)
    library.answers["cublasLtMatmul"] = 13
    for _ in range(2):
        assert torch.equal(site(x, weight, bias), F.linear(x, weight, bias))
    assert decided().way is None


@pytest.mark.parametrize("kind", ["a tensor", "a parameter", "a call site"])
def test_the_first_product_of_a_thread_is_pytorchs(pretend, kind):
    """cuBLASLt needs a context of CUDA in its thread, and F.linear makes it."""
    library = pretend(Known(100), Known(80))
    x, weight, bias = operands()
    if kind == "a parameter":
        weight = torch.nn.Parameter(weight, False)
    multiplied = algorithms.CallSite() if kind == "a call site" else linear
    for _ in range(3):
        multiplied(x, weight, bias)
    launched = [len(library.launched)]

    def twice():
        for _ in range(2):
            multiplied(x, weight, bias)
            launched.append(len(library.launched))

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert [n - launched[0] for n in launched] == [0, 0, 1]

"""Several threads use one injected model from the first call on: eager's bits in each."""

import copy
import sys
import threading

import pytest
import torch
from everything import EVERYTHING, share

import kernelwright as kw
from kernelwright import models

from .tape import graphs_on_the_cpu

THREADS = 16
# injections of one model; the second may find what the first left behind
ROUNDS = 2 if EVERYTHING else 1
NAMES = ("ltx-video", "flux-dev", "llama-3-8b")
HOW = {"tiny": True, "dtype": torch.float32}


@pytest.fixture(autouse=True)
def threads_take_turns_often():
    """Fifty times as often as usual; more often still, and the switches take half of the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def sizes(name, number):
    """Some threads use the same shapes at the same time, others use others, and all together more
    than are cached."""
    extra = number % 12
    return {"tokens": 12 + extra} if "text" not in presets(name) else {"text": 8 + extra}


def presets(name):
    return models.presets()[name].tiny_sizes


def given(name, count=THREADS):
    return [models.inputs(name, **HOW, seed=n, **sizes(name, n)) for n in range(count)]


@torch.no_grad()
def called(model, inputs):
    return model(**inputs)[0]


def together(work, count=THREADS):
    """Run `work(number)` in threads that start together; raises what any of them raised."""
    barrier, errors = threading.Barrier(count), []

    def run(number):
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise AssertionError(f"{len(errors)} of {count} threads: {errors[0]!r}") from errors[0]


def agree(models_, name, times=2):
    """Every thread has eager's bits for its own inputs, each model having its share of threads."""
    inputs = given(name)
    eager = models.build(name, **HOW)
    want = [called(eager, each) for each in inputs]
    wrong = []

    def work(number):
        model = models_[number % len(models_)]
        for _ in range(times):
            if not torch.equal(called(model, inputs[number]), want[number]):
                wrong.append(number)

    together(work)
    assert not wrong


@pytest.mark.compatibility("threads")
@pytest.mark.parametrize("name", share(NAMES, 2))
def test_first_calls_of_many_threads_on_one_model(name):
    model = models.build(name, **HOW)
    for _ in range(ROUNDS):
        report = kw.inject(model)
        agree([model], name)
        assert not report.problems
        kw.restore(model)


def test_first_calls_of_many_threads_with_the_same_inputs():
    model, (inputs,) = models.build("ltx-video", **HOW), given("ltx-video", 1)
    want = called(model, inputs)
    for _ in range(4 * ROUNDS):
        wrong = []
        with kw.injected(model):

            def work(number, wrong=wrong):
                if not torch.equal(called(model, inputs), want):
                    wrong.append(number)

            together(work)
        assert not wrong


@pytest.mark.parametrize("name", share(NAMES, 2))
def test_first_calls_of_many_threads_on_two_models_that_share_weights(name):
    first = models.build(name, **HOW)
    second = copy.deepcopy(first)
    for mine, other in zip(second.modules(), first.modules(), strict=True):
        mine._parameters.update(other._parameters)
    for model in (first, second):
        kw.inject(model)
    agree([first, second], name)


@pytest.mark.parametrize("numerics", ["fused", "fp8"])
def test_first_calls_of_many_threads_in_other_tiers_raise_nothing(numerics):
    model, inputs = models.build("ltx-video", **HOW), given("ltx-video")
    kw.inject(model, numerics=numerics)
    together(lambda number: called(model, inputs[number]))


def test_many_threads_and_graphs():
    with graphs_on_the_cpu():
        model = models.build("ltx-video", **HOW)
        kw.inject(model, graphs=True)
        agree([model], "ltx-video", times=4)


def test_weights_that_are_written_between_the_calls_of_many_threads():
    """Each round waits for all; the next one reads other weights."""
    model = models.build("ltx-video", **HOW)
    eager = copy.deepcopy(model)
    kw.inject(model)
    inputs = given("ltx-video", 8)
    for _ in range(4):
        want, wrong = [called(eager, each) for each in inputs], []

        def work(number, want=want, wrong=wrong):
            if not torch.equal(called(model, inputs[number]), want[number]):
                wrong.append(number)

        together(work, 8)
        assert not wrong
        with torch.no_grad():
            for each in (model, eager):
                for weight in each.parameters():
                    weight.mul_(1.05)


def drawn_meanwhile(work):
    """What another thread draws from the global generator while `work` runs."""
    draws, done = [], threading.Event()

    def draw():
        while not done.is_set():
            draws.append(tuple(torch.randn(4).tolist()))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return draws


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
def test_no_thread_draws_the_same_numbers_twice_while_another_sees_new_shapes(graphs):
    model = models.build("ltx-video", **HOW)
    with graphs_on_the_cpu():
        kw.inject(model, graphs=graphs)

        def first_calls():
            for each in given("ltx-video", 4):
                for _ in range(3 if graphs else 1):
                    called(model, each)

        draws = drawn_meanwhile(first_calls)
    assert len(draws) - len(set(draws)) == 0


def test_first_calls_leave_the_generator_where_they_found_it():
    """A model that draws no random numbers does not change what others draw."""
    model = models.build("ltx-video", **HOW)
    kw.inject(model)
    before = torch.get_rng_state()
    for each in given("ltx-video", 4):
        called(model, each)
    assert torch.equal(torch.get_rng_state(), before)

"""Wall times of calls, on a host whose speed changes."""

import pytest

from kernelwright.measure import timing


class Clock:
    """A host on which everything takes twice as long for a while."""

    def __init__(self, slow):
        self.now, self.slow, self.calls = 0.0, slow, 0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds * (2 if self.slow(self.calls) else 1)

    def call(self):
        self.calls += 1
        self.spend(0.01)


def measured(monkeypatch, slow, seconds=0.2):
    clock, pace = Clock(slow), timing.HostPace()

    def loop():
        begin = clock.now
        clock.spend(1e-4)
        pace.shortest = min(pace.shortest, clock.now - begin)
        return clock.now - begin

    monkeypatch.setattr(pace, "loop", loop)
    monkeypatch.setattr(timing, "_pace", pace)
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    return timing.milliseconds(clock.call, seconds), clock.calls


def test_calls_beside_which_the_host_is_slow_do_not_count(monkeypatch):
    ms, calls = measured(monkeypatch, lambda n: 3 < n < 16)
    assert ms == pytest.approx(10)
    assert calls < 30


def test_a_host_that_is_slow_for_long_is_waited_for(monkeypatch):
    ms, _ = measured(monkeypatch, lambda n: 1 < n < 20)
    assert ms == pytest.approx(10)


def test_a_host_that_stays_slow_is_taken_as_it_is(monkeypatch):
    ms, calls = measured(monkeypatch, lambda n: n > 1)
    assert ms == pytest.approx(20)
    assert calls < 32


def test_a_steady_host_is_measured_for_the_time_that_was_asked(monkeypatch):
    ms, calls = measured(monkeypatch, lambda n: False)
    assert ms == pytest.approx(10)
    assert 19 <= calls <= 21


def test_a_loop_takes_time():
    pace = timing.HostPace()
    assert pace.loop() > 0
    assert not pace.is_slow(pace.shortest)

"""A launch hands the driver what it was planned with, and the addresses and stream of the call."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

from kernelwright.backends import aot, cuda, torch_internals, triton
from kernelwright.backends.cuda import CudaLaunch

KERNEL = 0x7F0000001000


class Driver:
    """Stands for libcuda: reads the memory that a launch points to, and answers with `answers`."""

    def __init__(self):
        self.launches, self.answers = [], []
        words = [ctypes.c_void_p] * 4
        self.cuLaunchKernelEx = ctypes.PYFUNCTYPE(ctypes.c_int, *words)(self.launch)

    def launch(self, config, function, parameters, extra):
        *shape, stream, attributes, count = struct.unpack("@7IPPI", ctypes.string_at(config, 52))
        begin, where, size, bytes_at, end = (ctypes.c_void_p * 5).from_address(extra)
        assert (begin, size, end, parameters) == (1, 2, None, None)
        length = ctypes.c_size_t.from_address(bytes_at).value
        packed = ctypes.string_at(where, length)
        self.launches.append((function, shape, stream, (attributes, count), packed))
        return self.answers.pop(0) if self.answers else 0


@pytest.fixture
def stream(monkeypatch):
    """The current stream of each device, by number."""
    streams = {0: 0, 1: 0}
    monkeypatch.setattr(torch_internals, "raw_stream", streams.__getitem__)
    return streams


@pytest.fixture
def driver(monkeypatch, stream):
    made = Driver()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "compile_cubin", lambda code, arch: b"")
    monkeypatch.setattr(cuda, "_function", lambda device, cubin, name, shared: KERNEL)
    monkeypatch.setattr(cuda, "driver", lambda: made)
    return made


def loaded(**values):
    launch = CudaLaunch(
        source="ops/row/cuda.cuh",
        template="row<float>",
        arguments="RowArguments",
        grid=70000,
        block=256,
        pointers=("x", "weight", "", "out"),
        layout="qif",
        scalars=(5, -3, 0.5),
    )
    return launch.load(values, 1)


class TestCuda:
    def test_the_driver_sees_the_struct_that_the_kernel_takes(self, driver, stream):
        launch = loaded(x=torch.ones(1), weight=torch.ones(1), out=torch.ones(1))
        stream[1] = 2**40 + 8
        launch((2**47, 16, 48))
        ((function, shape, on, attributes, packed),) = driver.launches
        assert function == KERNEL
        assert shape == [70000, 1, 1, 256, 1, 1, 0]
        assert on == 2**40 + 8
        assert attributes == (0, 0)
        assert packed == struct.pack("@4Pqif", 2**47, 16, 0, 48, 5, -3, 0.5)

    def test_an_absent_tensor_is_a_null_pointer(self, driver):
        loaded(x=torch.ones(1), weight=None, out=torch.ones(1))((32, 64))
        assert driver.launches[0][-1] == struct.pack("@4Pqif", 32, 0, 0, 64, 5, -3, 0.5)

    def test_each_launch_has_its_own_addresses_and_stream(self, driver, stream):
        launch = loaded(x=torch.ones(1), weight=None, out=torch.ones(1))
        for number in (1, 2, 3):
            stream[1] = 8 * number
            launch((number, 16 + number))
        assert [(on, packed[:32]) for *_, on, _, packed in driver.launches] == [
            (8 * n, struct.pack("@4P", n, 0, 0, 16 + n)) for n in (1, 2, 3)
        ]
        assert len({tuple(shape) for _, shape, *_ in driver.launches}) == 1

    def test_a_launch_inside_another_one_does_not_share_its_memory(self, driver):
        """As two threads may: the first has filled in its addresses, then the second launches."""
        launch = loaded(x=torch.ones(1), weight=None, out=torch.ones(1))
        usual, seen = driver.launch, []

        def interrupted(config, function, parameters, extra):
            if not seen:
                seen.append(1)
                launch((3, 4))
            return usual(config, function, parameters, extra)

        words = [ctypes.c_void_p] * 4
        driver.cuLaunchKernelEx = ctypes.PYFUNCTYPE(ctypes.c_int, *words)(interrupted)
        launch((1, 2))
        found = [struct.unpack("@4P", packed[:32]) for *_, packed in driver.launches]
        assert found == [(3, 0, 0, 4), (1, 0, 0, 2)]

    def test_a_thread_without_a_context_gets_one(self, driver, monkeypatch):
        chosen = []
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        driver.answers = [cuda.INVALID_CONTEXT]
        loaded(x=torch.ones(1), weight=None, out=torch.ones(1))((1, 2))
        assert chosen == [1]
        first, second = driver.launches
        assert first == second

    def test_a_launch_that_fails_is_an_error_with_the_driver_s_words(self, driver):
        def explain(status, text):
            ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"invalid argument"

        driver.cuGetErrorString = explain
        driver.answers = [1]
        launch = loaded(x=torch.ones(1), weight=None, out=torch.ones(1))
        with pytest.raises(RuntimeError, match=r"launch of row<float> failed: invalid argument"):
            launch((1, 2))
        launch((1, 2))


class Flat:
    """A launcher of Triton 3.6: the kernel's arguments follow one by one."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self):
        self.calls, self.frames = [], 0
        self.launch = lambda *passed: self.calls.append(passed)

    def __call__(self, x, y, z, stream, function, *args):
        self.frames += 1
        self.launch(x, y, z, stream, function, False, True, None, None, *args)


class Packed(Flat):
    """A launcher of Triton 3.9: they are one tuple, behind descriptions of them."""

    def __call__(self, x, y, z, stream, function, metadata, hook, enter, leave, *args):
        self.frames += 1
        told = metadata, hook, enter, leave
        self.launch(x, y, z, stream, function, False, True, *told, None, None, b"types", args)


class Scratch(Flat):
    global_scratch_size = 64


class Opaque(Flat):
    """A launcher of some later Triton, that does what nobody has seen yet."""

    def __call__(self, x, y, z, stream, function, *args):
        self.frames += 1
        self.launch(function, stream, args, (x, y, z))


@pytest.mark.parametrize("kind", [Flat, Packed, Scratch, Opaque])
def test_triton_s_driver_is_given_what_its_launcher_would_give_it(kind, stream):
    fixed = (KERNEL, (4, 1, 0), None, None, None)
    run, plain = kind(), kind()
    launch = triton.launcher(run, (7, 2, 1), 1, fixed, lambda given: (*given, 5, 0.5))
    before = run.frames
    for addresses, stream[1] in (((16, 32), 8), ((48, 64), 9)):
        launch(addresses)
        plain(7, 2, 1, stream[1], *fixed, *addresses, 5, 0.5)
    assert run.calls == plain.calls
    assert run.frames - before == (2 if kind in (Scratch, Opaque) else 0)


def test_the_launcher_of_the_triton_that_is_installed_is_passed_by(monkeypatch, stream):
    """Its order of arguments is known only to it; what it needs at run time stands still here."""
    runtime = pytest.importorskip("triton").runtime
    from triton.backends.nvidia.driver import CudaLauncher

    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=None))
    calls: list[tuple] = []

    def made():
        run = object.__new__(CudaLauncher)
        names = ("gsan_enabled", "launch_cooperative_grid", "launch_pdl")
        vars(run).update(dict.fromkeys(names, False), num_ctas=1)
        vars(run).update(arg_annotations=b"annotations", kernel_signature=b"signature")
        for scratch in ("global_scratch", "profile_scratch"):
            vars(run).update({f"{scratch}_size": 0, f"{scratch}_align": 1})
        run.launch = lambda *passed: calls.append(passed)
        return run

    fixed = (KERNEL, (4, 1, 0), None, None, None)
    run = made()
    launch = triton.launcher(run, (7, 1, 1), 0, fixed, lambda given: (*given, 5))
    with monkeypatch.context() as passed_by:
        passed_by.setattr(CudaLauncher, "__call__", None)
        launch((16, 32))
    made()(7, 1, 1, stream[0], *fixed, 16, 32, 5)
    assert calls[0] == calls[1]


def test_a_kernel_compiled_ahead_of_time_is_called_without_the_frame_around_it(monkeypatch):
    calls = []
    overload = SimpleNamespace(op=lambda number, addresses: calls.append((number, addresses)))
    ops = SimpleNamespace(
        launch=SimpleNamespace(default=overload), prepare=lambda *given: 7, kernels=list
    )
    monkeypatch.setattr(aot, "_launcher", lambda: ops)
    launch = CudaLaunch("s.cuh", "t", "A", 1, 32, ("x", "out"), "q", (5,))
    aot.AotLaunch(launch).load({"x": 1, "out": 1}, 0)((16, 32))
    assert calls == [(7, (16, 32))]

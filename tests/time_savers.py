"""Fixtures that save time: what PyTorch, Triton and Typer do for each test, done once, not at all
or in a shorter way."""

import os
import warnings
from functools import cache

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def commands_made_once():
    """Every call of the command line in a test makes all commands with their options anew, which
    takes longer than most of them run."""
    from typer import testing

    with pytest.MonkeyPatch.context() as session:
        session.setattr(testing, "_get_command", cache(testing._get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def language_patched_once():
    """Triton's interpreter patches its language for every launch and every function that a kernel
    calls, which takes longer than the kernels here: keep the first patch."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    class Stays:
        def restore(self):
            pass

    def once(function):
        module = function.__globals__["__name__"]
        if module not in patched:
            patch(function)
            patched.add(module)
        return Stays()

    with pytest.MonkeyPatch.context() as session:
        session.setattr(interpreter, "_patch_lang", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def types_known_in_the_interpreter():
    """Triton's interpreter derives shape, size and name of every value anew, and looks up its NumPy
    type in a table that it makes for that: a quarter of the time of a kernel here."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.language import core
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as session:
        blocks = _remembered(core.block_type, _block_key, _block_own)
        session.setattr(core.block_type, "__init__", blocks)
        tensors = _remembered(core.tensor, _tensor_key, _tensor_own)
        session.setattr(core.tensor, "__init__", tensors)
        in_numpy, known = interpreter._get_np_dtype, {}

        def np_dtype(of):
            name = of.scalar.name
            if name not in known:
                known[name] = in_numpy(of)
            return known[name]

        session.setattr(interpreter, "_get_np_dtype", np_dtype)
        yield


def _remembered(cls, key_of, own):
    """The constructor of a class whose attributes, but for its own, follow from a key."""
    usual, known = cls.__init__, {}

    def construct(self, first, second):
        key = key_of(first, second)
        if key in known:
            vars(self).update(known[key])
            vars(self).update(own(first, second))
        else:
            usual(self, first, second)
            known[key] = {n: v for n, v in vars(self).items() if n not in own(first, second)}

    return construct


def _block_key(element_ty, shape):
    return element_ty.name, *(getattr(size, "value", size) for size in shape)


def _block_own(element_ty, shape):
    return {"element_ty": element_ty}


def _tensor_key(handle, type):
    return tuple(type.shape) if type.is_block() else ()


def _tensor_own(handle, type):
    return {"handle": handle, "type": type, "dtype": type.scalar}


@pytest.fixture(scope="session", autouse=True)
def half_products_in_float32():
    """A CPU without bfloat16 takes up to 250 times as long for a bfloat16 GEMM or convolution as
    for a float32 one: multiply in float32 and round once, as a GPU does."""
    if torch.cuda.is_available():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(.|\n)*Overriding a previously")
        for name in ("mm", "addmm", "bmm", "baddbmm", *CONVOLUTIONS):
            product = _product_in_float32(torch.library.get_kernel(f"aten::{name}", "CPU"))
            library.impl(name, product, "CPU", with_keyset=True, allow_override=True)
        library.impl("addmm_", _added_in_place, "CPU", allow_override=True)
    # it is active as long as the library object is alive
    yield library


CONVOLUTIONS = ("_slow_conv2d_forward", "_slow_conv2d_backward.output_mask", "slow_conv3d_forward")


def _product_in_float32(usual):
    def product(keys, *args, **scales):
        dtype = args[0].dtype
        if dtype not in (torch.float16, torch.bfloat16):
            return usual.call_boxed(keys, *args, **scales)
        wide = (a.float() if isinstance(a, torch.Tensor) else a for a in args)
        found = usual.call_boxed(keys, *wide, **scales)
        if isinstance(found, torch.Tensor):
            return found.to(dtype)
        return tuple(None if t is None else t.to(dtype) for t in found)

    return product


def _added_in_place(total, *factors, **scales):
    return total.copy_(torch.addmm(total, *factors, **scales))


@pytest.fixture(scope="session", autouse=True)
def guards_without_a_stopwatch():
    """After every compilation Dynamo times its guards, with the caches of the CPU flushed before:
    16 ms, and nothing reads it."""
    from torch._dynamo import guards

    with pytest.MonkeyPatch.context() as session:
        session.setattr(guards, "profile_guard_manager", lambda *given: 0.0)
        yield

"""Kernels that repeat other ways of PyTorch: QuACK's F.rms_norm, and erf as CUDA has had it."""

import re

import pytest
import torch
from planned import usage

from kernelwright.backends import HOPPER, cuda
from kernelwright.bench.exactness import planned
from kernelwright.calibration import functions
from kernelwright.fuser.cuda_source import Tensor
from kernelwright.fuser.launching import kernel_of, launch_of
from kernelwright.ops import ways
from kernelwright.ops.op import registry

SOURCE = """#include "ops/glu/cuda.cuh"
extern "C" __global__ void entry(float* p) { *p = kernelwright::%s::of(*p); }
"""


def numbers(function):
    """The numbers in the assembly of an erf, and how often it multiplies and adds."""
    from cuda.bindings import nvrtc

    def made(status, *results):
        assert int(status) == 0
        return results[0] if results else None

    paths = [f"--include-path={p}" for p in (cuda.PACKAGE, *cuda.include_paths())]
    options = [o.encode() for o in ("--gpu-architecture=compute_90", "--std=c++17", *paths)]
    source = (SOURCE % function).encode()
    program = made(*nvrtc.nvrtcCreateProgram(source, b"erf.cu", 0, [], []))
    made(*nvrtc.nvrtcCompileProgram(program, len(options), options))
    ptx = b" " * made(*nvrtc.nvrtcGetPTXSize(program))
    made(*nvrtc.nvrtcGetPTX(program, ptx))
    text = ptx.decode()
    body = text[text.index(".entry") :]
    return sorted(set(re.findall("0f[0-9A-F]{8}", body))), body.count("fma.rn"), body.count("ex2")


def test_the_erf_of_the_compiler_is_written_out():
    """So that its bits can be had by any other compiler. A new one in a new CUDA fails here."""
    pytest.importorskip("cuda.core")
    written = ways.ERFS[ways._erf_of(cuda.nvrtc_version())]
    assert numbers("CompilersErf") == numbers(written)


def test_the_two_erfs_differ():
    pytest.importorskip("cuda.core")
    both = [numbers(name) for way, name in ways.ERFS.items() if way != ways.COMPILER]
    assert both[0][0] != both[1][0]
    assert both[0][1:] == both[1][1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "chain", "width"),
    [
        ("adaln_rmsnorm", "torch", 2048),
        ("qk_norm_rope", "diffusers", 128),
        ("rmsnorm", "torch", 5120),
    ],
)
def test_quacks_order_compiles_and_spills_nothing(op, chain, width):
    pytest.importorskip("cuda.core")
    with ways.assuming("F.rms_norm", ways.QUACK):
        launch = planned(registry()[op], chain, 333, width, torch.bfloat16, HOPPER)
    assert "QuackRms" in launch.template
    _, report = cuda.build(launch.code, "sm_90", verbose=True)
    assert all(used.clean for used in usage(report)), report


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("erf", ways.ERFS)
def test_what_a_calibration_compares_on_a_gpu_compiles(erf, dtype):
    pytest.importorskip("cuda.core")
    x = functions.numbers(dtype, "cpu")
    program = functions.program_of(tuple(functions.FUNCTIONS), x.shape, dtype)
    layout = {name: Tensor((x.shape[1], 1), dtype) for name in names(program)}
    with ways.assuming("F.gelu", erf):
        launch = launch_of(kernel_of(program, layout))
    _, report = cuda.build(launch.code, "sm_90", verbose=True)
    assert len(usage(report)) == 1, report


def names(program):
    return [*program.loads, *(s.target for s in program.stores)]

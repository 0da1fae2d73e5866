"""The installed PyTorch on this GPU: kernels have its bits, and the trees of its sums are found."""

import os
import subprocess

import pytest
import torch

from kernelwright.backends.cache import KernelCache
from kernelwright.backends.cuda import nvrtc_version
from kernelwright.calibration import background, calibrate, finder, functions
from kernelwright.calibration.sums import SUMS
from kernelwright.ops import ways
from kernelwright.ops.op import registry
from kernelwright.ops.plan import How, LaunchPlan


def test_every_sum_and_function_has_the_bits_of_a_kernel():
    found = calibrate("cuda")
    assert {f.subject for f in found} == set(ways.SUBJECTS)
    assert [str(f) for f in found if f.way is None] == []
    assert all(f.way in f.orders for f in found if f.orders is not None)


@pytest.mark.parametrize("width", [64, 128, 1152, 2048, 3072, 4096])
@pytest.mark.parametrize("subject", ["at::mean", "F.rms_norm"])
def test_the_tree_of_pytorchs_sum_is_known(subject, width):
    assert ways.way(subject) in finder.matching_ways(subject, width, torch.bfloat16, "cuda")


def by_the_kernel(subject, asked, rows):
    """What `finder` observes of our kernel instead of PyTorch's."""
    op, chain = registry()[SUMS[subject][0]], SUMS[subject][1]
    width = rows.shape[-1]
    eps = -(finder.LARGE**2 / width) * (1 - 2.0**-19)
    args = rows.reshape(-1, width), None, eps
    plan = LaunchPlan(op, args, None, How(chain, "cuda", inplace=False, strict=True), 16)
    seen = plan.follow(args, None).float().abs().amax(-1).view(2, len(asked))
    return (seen[0] != seen[1]).tolist()


@pytest.mark.parametrize("width", [64, 128, 1152, 2048, 3072])
@pytest.mark.parametrize("way", [ways.ATEN, ways.QUACK])
def test_a_kernel_sums_in_the_order_of_its_tree(way, width):
    """Also that of QuACK where PyTorch does not use it."""
    with ways.assuming("F.rms_norm", way):
        found = finder.matching_ways("F.rms_norm", width, torch.bfloat16, "cuda", by_the_kernel)
    assert found == [way]


def test_the_erf_of_the_compiler_is_the_one_written_out_for_it():
    written = ways._erf_of(nvrtc_version())
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, both = functions.numbers(dtype, "cuda"), []
        for way in (ways.COMPILER, written):
            with ways.assuming("F.gelu", way):
                both.append(functions.computed(("F.gelu",), x)["F.gelu"])
        assert torch.equal(*(b.nan_to_num() for b in both))


def test_the_process_in_the_background_keeps_what_it_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(KernelCache, "default", lambda: KernelCache(tmp_path))
    assert ways.stored() is None
    env = {**os.environ, "KERNELWRIGHT_CACHE": str(tmp_path)}
    python, _, module = background.command()
    # of the lowest priority it would wait for all other tests that run beside this one
    code = f"import os, runpy; os.nice = abs; runpy.run_module({module!r}, run_name='__main__')"
    subprocess.run([python, "-c", code], env=env, check=True, timeout=300)
    assert None not in ways.stored().values()

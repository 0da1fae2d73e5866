"""The Hub package: made from ops alone, loaded by `kernels`, beside an installed kernelwright."""

import json
import sys
from pathlib import Path

import pytest
import torch
from declared import full
from numerics import as_tuple
from typer.testing import CliRunner

import kernelwright as kw
from kernelwright import hub
from kernelwright.cli import app
from kernelwright.hub import package as packaging
from kernelwright.ops.case import Inputs
from kernelwright.ops.op import registry

PROJECT = Path(__file__).resolve().parents[2] / "hub" / "ltx-kernels"


def test_it_has_a_variant_for_each_kind_of_machine(package):
    found = {p.name: json.loads((p / "metadata.json").read_text()) for p in _variants(package)}
    assert set(found) == {"torch-cuda", "torch-rocm", "torch-cpu", "torch-universal"}
    assert {v: m["backend"]["type"] for v, m in found.items()} == packaging.VARIANTS
    assert len({m["id"] for m in found.values()}) == len(found)


def test_kernels_itself_finds_its_digest_right_and_its_version_alpha(package):
    from kernels._rust import Digest, DigestValidationError, Metadata

    for variant in _variants(package):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert metadata.version == 0
        now = Digest.hash_variant(metadata.digest.algorithm, variant)
        assert metadata.digest.files == now.files
        metadata.digest.validate(now)
    file = variant / "__init__.py"
    text = file.read_text()
    try:
        file.write_text(text + "\n")
        with pytest.raises(DigestValidationError, match=r"__init__\.py"):
            metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    finally:
        file.write_text(text)


def test_kernels_takes_its_build_toml():
    from kernels._rust import Build

    assert [str(b) for b in Build.open(PROJECT).general.backends] == ["cuda"]


def test_the_same_ops_make_the_same_package(package, tmp_path):
    again = hub.build(tmp_path)
    for built in again:
        there = package / "build" / built.variant
        files = {p.relative_to(built.path) for p in built.path.rglob("*") if p.is_file()}
        ours = {f: (built.path / f).read_text() for f in files}
        assert ours == {f: (there / f).read_text() for f in files}


def test_get_local_kernel_takes_the_folder_its_build_and_a_variant(package, kernel):
    from kernels import get_local_kernel

    assert get_local_kernel(package / "build") is kernel
    assert get_local_kernel(package / "build" / "torch-cpu") is kernel


def test_get_kernel_takes_it_through_local_kernels(package, kernel, monkeypatch):
    from kernels import get_kernel, has_kernel

    monkeypatch.setenv("LOCAL_KERNELS", f"kernelwright/ltx-kernels={package}")
    assert has_kernel("kernelwright/ltx-kernels", version=0)
    assert get_kernel("kernelwright/ltx-kernels", version=0) is kernel


def test_it_offers_every_public_op(kernel):
    assert set(kw.ops.__all__) <= set(kernel.__all__)


def test_its_ops_are_its_own_and_give_the_same_bits(kernel):
    theirs, ours = kernel.registry(), registry()
    assert set(kw.ops.__all__) & set(ours) <= set(theirs) <= set(ours)
    for name in theirs:
        op = ours[name]
        arguments = full(op).arguments(Inputs(torch.float32))
        got, want = (as_tuple(o.call(arguments)) for o in (theirs[name], op))
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), name
        assert theirs[name] is not op


def test_two_packages_and_kernelwright_live_in_one_process(package, kernel):
    from kernels import get_local_kernel

    other = get_local_kernel(package / "build" / "torch-universal")
    spaces = {kernel.__name__, other.__name__, "kernelwright"}
    assert len(spaces) == 3
    x = torch.randn(2, 8, requires_grad=True)
    gradients = []
    for module in (kernel, other, kw):
        (module.rmsnorm(x) ** 3).sum().backward()
        gradients.append(x.grad)
        x.grad = None
    for space in spaces:
        assert getattr(torch.ops, space).rmsnorm is not None
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_use_backend_of_one_package_leaves_the_other_alone(kernel):
    x = torch.ones(1, 4)
    with kernel.use_backend("cuda"):
        kw.rmsnorm(x)
        with pytest.raises(ValueError, match="CUDA kernels need a CUDA GPU"):
            kernel.rmsnorm(x)


def test_it_loads_nothing_of_kernelwright(kernel):
    ours = {n for n in sys.modules if n.startswith(kernel.__name__)}
    assert any(".ops." in n for n in ours)
    for name in ours:
        for value in vars(sys.modules[name]).values():
            home = getattr(value, "__module__", None) or ""
            assert not str(home).startswith("kernelwright"), (name, value)


def test_building_again_replaces_what_was_there(tmp_path):
    stale = tmp_path / "build" / "torch-cpu" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    run = CliRunner().invoke(
        app, ["hub", "build", "--out", str(tmp_path), "--variant", "torch-cpu"]
    )
    assert run.exit_code == 0, run.output
    assert not stale.exists()
    assert [p.name for p in (tmp_path / "build").iterdir()] == ["torch-cpu"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "{file}"], "is a file"),
        (["--out", "{file}x", "--variant", "torch-abacus"], "no variant torch-abacus"),
    ],
)
def test_a_build_that_cannot_be_made_says_why_in_one_line(tmp_path, arguments, says):
    file = tmp_path / "file"
    file.write_text("")
    run = CliRunner().invoke(app, ["hub", "build", *(a.format(file=file) for a in arguments)])
    assert run.exit_code == 1
    assert says in run.output
    assert len(run.output.strip().splitlines()) == 1


def test_kernels_benchmark_runs_on_it(package, monkeypatch):
    """What `kernels benchmark hub/ltx-kernels` does, with the package built into that folder."""
    from kernels.cli import benchmark

    results, _ = benchmark.run_benchmark_script(
        PROJECT / "benchmarks" / "benchmark.py",
        iterations=1,
        warmup=0,
        cwd=PROJECT,
        repo_id=str(package),
        is_local=True,
        revision="local",
    )
    assert len(results) == 5
    assert all(r.verified for r in results.values())


def _variants(folder):
    return sorted((folder / "build").iterdir())

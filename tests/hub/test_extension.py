"""The kernels compiled ahead of time: the texts that NVRTC compiles, and every launch of ours."""

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from declared import OPS, small
from typer.testing import CliRunner

import kernelwright as kw
from kernelwright import backends
from kernelwright.backends import HOPPER, Unsupported, aot, cuda
from kernelwright.cli import app
from kernelwright.hub import build_files, extension, package
from kernelwright.ops.case import Inputs
from kernelwright.ops.op import registry
from kernelwright.ops.plan import Call

tomllib = pytest.importorskip("tomllib")
PROJECT = Path(__file__).resolve().parents[2] / "hub" / "ltx-kernels"
AOT = PROJECT.with_name("ltx-kernels-aot")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The source project as kernel-builder would take it."""
    out = tmp_path_factory.mktemp("source")
    run = CliRunner().invoke(app, ["hub", "source", "--out", str(out), "--project", str(PROJECT)])
    assert run.exit_code == 0, run.output
    return out


@pytest.fixture(scope="module")
def instances():
    return extension.instances("models")


def test_there_is_one_text_of_each_kernel(project):
    assert not list(PROJECT.glob("include/**/*")), "copies of the headers"
    headers = {n: t for n, t in cuda.headers().items() if n in package.sources()}
    assert headers
    for name, text in headers.items():
        assert (project / "include" / name).read_text() == text
    for file in PROJECT.glob("cuda/*"):
        assert "__device__" not in file.read_text(), f"{file.name} has device code of its own"


def test_it_holds_every_kernel_of_the_models(project, instances):
    for family, launches in instances.items():
        lines = (project / "cuda" / f"{family}.inc").read_text().splitlines()
        pattern = r"INSTANCE\((\d+), (\d+), ([\w:]+), (.*)\)"
        listed = [re.fullmatch(pattern, line).groups() for line in lines]
        assert [int(number) for number, *_ in listed] == list(range(len(lines)))
        assert {t: (int(b), a) for _, b, a, t in listed} == {
            x.template: (x.block, x.arguments) for x in launches
        }
    held = {x.template for launches in instances.values() for x in launches}
    op = registry()["gated_residual_norm"]
    case = next(c for c in op.cases if c.large)
    for dtype in extension.DTYPES:
        for launch in extension.launches(op, case.arguments(Inputs(dtype, "meta"))):
            assert launch.template in held


def test_with_all_cases_it_holds_every_launch_of_the_gpu_tests():
    """Planned again as a call does it: for the addresses that tensors really have."""
    held = {x.template for launches in extension.instances("all").values() for x in launches}
    asked = 0
    for op in (op for op in OPS if "cuda" in op.backends):
        for case in small(op):
            for exact in (None, *op.exact):
                for launch in _asked(op, case.arguments(Inputs(torch.bfloat16)), exact):
                    assert launch.template in held, (op.name, case.name, exact)
                    asked += 1
    assert asked > len(OPS)


def gaps(t):
    return t.ndim > 0 and t.shape[-1] > 1 and t.stride(-1) != 1


def _asked(op, arguments, exact):
    args = [arguments[n] for n in op.arguments]
    # rows with gaps are copied before a launch
    args = [a.contiguous() if isinstance(a, torch.Tensor) and gaps(a) else a for a in args]
    values = dict(zip(op.arguments, args, strict=True))
    values |= dict(zip(op.outputs, op.allocate(*args), strict=True))
    alignment = 16 if all(values[n].numel() for n in op.outputs) else 0
    while alignment:
        call = Call(values, op=op.name, exact=exact, target=HOPPER, alignment=alignment)
        try:
            launch = op.kernels.cuda(call)
        except Unsupported:
            return
        yield launch
        used = [values[n] for n in launch.pointers if n and values[n] is not None]
        bits = functools.reduce(int.__or__, (t.data_ptr() for t in used)) & (launch.alignment - 1)
        alignment = bits & -bits


def test_build_toml_names_files_that_are_there(project, instances):
    config = tomllib.loads((project / "build.toml").read_text())
    assert config["general"]["edition"] == 5
    assert config["general"]["name"] == package.NAME
    assert config["general"]["version"] == package.VERSION
    assert list(config["kernel"]) == list(instances)
    for part in (config["torch"], *config["kernel"].values()):
        assert all((project / file).is_file() for file in part["src"])
        assert all((project / folder).is_dir() for folder in part["include"])
    for kernel in config["kernel"].values():
        assert tuple(kernel["cuda-capabilities"]) == extension.ARCHS
        # what a kernel includes is among its sources
        sources = {Path(file).name for file in kernel["src"]}
        for file in kernel["src"]:
            text = (project / file).read_text()
            included = re.findall(r'^#include "(.*)"', text, flags=re.M)
            assert {Path(i).name for i in included} <= sources


def test_the_hand_written_part_names_no_op_and_no_family(instances):
    """What is generated needs no list to be kept: see test_new_op.py."""
    parts = [PROJECT / p for p in ("build.toml", "cuda", "torch-ext")]
    parts += [AOT / "setup.py", AOT / "python"]
    files = [f for p in parts for f in (p, *p.rglob("*")) if f.is_file()]
    for file in (f for f in files if f.suffix != ".pyc"):
        words = set(re.findall(r"[a-z]+", file.read_text().lower()))
        assert not words & {*instances, *(op.name for op in OPS)}, file


def test_what_kernel_builder_writes_is_not_there_before(project):
    """`kernel-builder create-pyproject` stops where one of its own files exists."""
    made = ("setup.py", "pyproject.toml", "CMakeLists.txt", "torch-ext/registration.h")
    for file in (*made, f"torch-ext/{package.PYTHON_NAME}/_ops.py"):
        assert not (PROJECT / file).exists(), file
        assert not (project / file).exists(), file


def test_a_build_without_kernel_builder_has_its_header_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    made = extension.plan(PROJECT, tmp_path)
    assert made.archs == ("9.0",)
    assert (tmp_path / "torch-ext" / "registration.h").read_text() == build_files.REGISTRATION
    assert all(p.is_file() for p in made.sources)


def test_every_op_is_registered_with_torch_library():
    text = "".join(p.read_text() for p in (PROJECT / "torch-ext").iterdir())
    assert "TORCH_LIBRARY_EXPAND" in text
    assert "pybind" not in (text + build_files.REGISTRATION).lower()


@pytest.mark.skipif(extension.compiler() is None, reason="nvcc is not here")
def test_nvcc_compiles_every_file_for_every_gpu(project, instances, tmp_path, monkeypatch):
    """A kernel of one dtype, another one from family to family; the whole lists take minutes. The
    headers ask for one capability, 8.0, so the front end runs below it and from it on, and the
    assembler for each GPU."""
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert extension.archs() == extension.ARCHS
    asked = set(re.findall(r"__CUDA_ARCH__ *\S+ *\d+", "".join(cuda.headers().values())))
    assert asked == {"__CUDA_ARCH__ >= 800"}
    codes = [f"-gencode=arch=compute_{v},code=sm_{n}" for v, n in _through(extension.ARCHS)]
    sources = shutil.copytree(project / "cuda", tmp_path / "cuda")
    for number, (family, launches) in enumerate(instances.items()):
        few = list({x.template.partition(",")[0]: x for x in launches}.values())
        assert len(few) == 3
        (sources / f"{family}.inc").write_text(build_files.listing([few[number % 3]]))
    # as one unit: the headers of CUDA take longer to read than the kernels to compile
    unit, built = sources / "all.cu", tmp_path / "all.o"
    unit.write_text(
        "".join(f'#include "{f}.cu"\n#undef FAMILY\n#undef INSTANCES\n' for f in instances)
    )
    folders = [sources, project / "include"]
    command = [extension.compiler(), *codes, *(f"-I{p}" for p in folders)]
    subprocess.run([*command, "-c", str(unit), "-o", str(built)], check=True)
    assert built.stat().st_size


def _through(archs):
    """Which virtual architecture to compile each GPU's code through."""
    numbers = [a.replace(".", "") for a in archs]
    return [("75" if n == "75" else "80", n) for n in numbers]


class Library:
    """Stands for the built library: its ops, and what they were given."""

    def __init__(self, names):
        self.names, self.prepared, self.launched = names, [], []
        self.launch = self
        self.default = lambda number, addresses: self.launched.append((number, addresses))

    def kernels(self):
        return self.names

    def prepare(self, *arguments):
        self.prepared.append(arguments)
        return len(self.prepared)


@pytest.fixture
def library(instances):
    before = list(aot._connected)
    held = [x.template for launches in instances.values() for x in launches]
    made = Library(held)
    aot.connect(made)
    yield made
    aot._connected[:] = before
    aot._launcher.cache_clear()
    aot.kernels.cache_clear()


def test_a_launch_hands_over_what_nvrtc_kernels_are_given(library):
    import struct

    op = registry()["gated_residual_norm"]
    arguments = next(c for c in op.cases if c.large).arguments(Inputs(torch.bfloat16, "meta"))
    launch = next(extension.launches(op, arguments))
    outs = op.allocate(*(arguments[n] for n in op.arguments))
    values = arguments | dict(zip(op.outputs, outs, strict=True))
    aot.compiled(launch).load(values, 0)([1, 2, 3])
    ((template, grid, block, present, words),) = library.prepared
    assert (template, grid, block) == (launch.template, launch.grid, launch.block)
    assert present == [values.get(n) is not None for n in launch.pointers]
    pointers = len(launch.pointers)
    whole = struct.pack(f"@{pointers}P{launch.layout}0q", *[0] * pointers, *launch.scalars)
    assert struct.pack(f"@{len(words)}q", *words) == whole[8 * pointers :]
    assert library.launched == [(1, [1, 2, 3])]


def test_what_the_library_does_not_hold_is_named(library):
    op = registry()["rmsnorm"]
    x = torch.empty(3, 1234, device="meta", dtype=torch.bfloat16)
    launch = next(extension.launches(op, {"input": x, "weight": None, "eps": 1e-6}))
    with pytest.raises(Unsupported, match=r"the library has no kernelwright::row<.*1234"):
        aot.compiled(launch)


def test_without_the_library_the_backend_says_how_to_build_it(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if not aot.installed(aot.MODULE):
        problem = aot.problem(torch.device("cuda", 0), torch.bfloat16)
        assert "pip install" in problem
    with pytest.raises(ValueError, match="backend 'aot': tensors are on cpu"):
        kw.rmsnorm(torch.ones(1, 4), backend="aot")


def test_exact_modes_take_the_library_where_nvrtc_is_not(monkeypatch):
    there = {"cuda": "cuda-core is not installed", "triton": None, "aot": None}
    monkeypatch.setattr(backends, "problem", lambda backend, device, dtype: there[backend])
    op, gpu = registry()["rmsnorm"], torch.device("cuda", 0)
    assert op.choose_for(gpu, torch.bfloat16, "torch").backend == "aot"
    assert op.choose_for(gpu, torch.bfloat16).backend == "triton"
    assert op.choose_for(gpu, torch.bfloat16, backend="aot").backend == "aot"


def test_a_folder_that_is_no_project_is_one_line(tmp_path):
    run = CliRunner().invoke(app, ["hub", "source", "--out", "x", "--project", str(tmp_path)])
    assert run.exit_code == 1
    assert "has no build.toml" in run.stderr

"""The Hub's rules for a kernel package, checked on disk: each failure is one line with its fix.

Layout, metadata, imports, namespaces and layers are checked without running any code; then
`get_local_kernel` loads the variant for this machine.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .digest import differences

NOARCH = r"torch-(cuda|rocm|xpu|metal|cpu|npu|neuron|tpu|universal)"
COMPILED = (
    r"torch(-stable-abi)?\d+(-cxx11|-cxx98)?-(cu\d+|rocm\d+|xpu\d+|metal|cpu|cann\d+)-"
    r"(x86_64|aarch64)-(linux|darwin|windows)"
)
VARIANT = re.compile(f"{NOARCH}|{COMPILED}")
NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
BACKENDS = ("cann", "cpu", "cuda", "metal", "neuron", "rocm", "tpu", "xpu")
PYTHON_DEPENDS = ("einops", "helion", "tvm-ffi", "nvidia-cutlass-dsl", "onednn", "nki")
IMPORTS = {"torch", "triton"} | sys.stdlib_module_names
# decorators and functions of torch.library whose first argument names an op
NAMING = ("custom_op", "triton_op", "register_kernel", "register_fake", "register_vmap")
FLAGS = {"can_torch_compile", "has_backward"}


@dataclass(frozen=True)
class Failure:
    """Where, what is wrong, and what to do."""

    where: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}; {self.fix}"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def check(folder: Path, load: bool = True) -> list[Failure]:
    """All failures of the variants in `folder` or `folder/build`, or of `folder` if it is one."""
    folder = folder.resolve()
    found = variants(folder)
    if not found:
        fix = "build one with `kernelwright hub build --out DIR`"
        return [Failure(folder.name, "no build variant such as build/torch-cuda", fix)]
    failures: list[Failure] = []
    ids: dict[str, str] = {}
    for variant in found:
        failures += _layout(variant)
        metadata, wrong = _metadata(variant)
        failures += wrong
        name = str(metadata.get("id"))
        if name in ids:
            text = f"its id {name} is that of {ids[name]} too"
            failures.append(Failure(variant.name, text, "give each variant an id of its own"))
        ids[name] = variant.name
        for file in sorted(variant.rglob("*.py")):
            failures += _python(file, variant)
    # load only a package whose files are right
    return failures or (_loads(folder, found) if load else [])


def variants(folder: Path) -> list[Path]:
    """The variant folders of a kernel."""
    for base in (folder, folder / "build"):
        places = sorted(base.iterdir()) if base.is_dir() else []
        found = [p for p in places if p.is_dir() and VARIANT.fullmatch(p.name)]
        if found:
            return found
    return [folder] if (folder / "metadata.json").is_file() else []


def _layout(variant: Path) -> Iterator[Failure]:
    if not VARIANT.fullmatch(variant.name):
        fix = "name it torch-cuda, or torch211-cxx11-cu130-x86_64-linux for compiled code"
        yield Failure(variant.name, "no name of a variant", fix)
    if not (variant / "__init__.py").is_file():
        yield Failure(variant.name, "no __init__.py", "put the package's files into this folder")
    if not (variant / "_ops.py").is_file():
        fix = "add one with `ops` and `add_op_namespace_prefix`"
        yield Failure(variant.name, "no _ops.py", fix)
    if not ((variant / "layers.py").is_file() or (variant / "layers" / "__init__.py").is_file()):
        yield Failure(variant.name, "no layers", "add layers.py, or kernelize cannot use it")
    for library in variant.rglob("*.so"):
        if not library.name.endswith(".abi3.so"):
            fix = "build it with py_limited_api=True"
            yield Failure(f"{variant.name}/{library.name}", "bound to one Python", fix)


def _metadata(variant: Path) -> tuple[dict[str, Any], list[Failure]]:
    where = f"{variant.name}/metadata.json"
    try:
        read = json.loads((variant / "metadata.json").read_text())
    except FileNotFoundError:
        return {}, [Failure(where, "it is not there", "write name, id, version and backend to it")]
    except json.JSONDecodeError as error:
        return {}, [Failure(where, f"no JSON ({error})", "write it with json.dump")]
    if not isinstance(read, dict):
        return {}, [Failure(where, "no JSON object", "write name, id, version and backend to it")]
    wrong: list[Failure] = []

    def hold(right: bool, problem: str, fix: str) -> None:
        if not right:
            wrong.append(Failure(where, problem, fix))

    for key in ("name", "id", "version", "license", "python-depends", "backend", "digest"):
        hold(key in read, f"no {key!r}", "add it")
    name, ident, version = read.get("name", "aa"), read.get("id", "a"), read.get("version", 1)
    fix = "use small letters, digits and dashes"
    hold(bool(NAME.fullmatch(str(name))), f"name {name!r} is refused", fix)
    fix = "it becomes a module and a torch.ops namespace: use a Python identifier"
    hold(str(ident).isidentifier(), f"id {ident!r} is refused", fix)
    fix = "use an integer: 0 for alpha and beta, then count from 1"
    hold(type(version) is int and version >= 0, f"version is {version!r}", fix)
    for depends in read.get("python-depends", ()):
        fix = "leave it out; torch brings triton" if depends == "triton" else "leave it out"
        hold(depends in PYTHON_DEPENDS, f"python-depends names {depends!r}", fix)
    backend = read.get("backend", {"type": "cuda"})
    kind = backend.get("type") if isinstance(backend, dict) else backend
    hold(kind in BACKENDS, f"backend is {kind!r}", f"use one of {', '.join(BACKENDS)}")
    if isinstance(stated := read.get("digest"), dict):
        for problem in differences(variant, stated):
            hold(False, problem, "build the package again, or `kernel-builder hash` it")
    elif "digest" in read:
        hold(False, "digest is no object", "build the package again, or `kernel-builder hash` it")
    return read, wrong


def _python(file: Path, variant: Path) -> Iterator[Failure]:
    inside = file.relative_to(variant)
    try:
        tree = ast.parse(file.read_text())
    except SyntaxError as error:
        yield Failure(f"{variant.name}/{inside}:{error.lineno}", "no Python", "correct the syntax")
        return
    layers = inside.parts[0] in ("layers", "layers.py")
    for node in ast.walk(tree):
        where = f"{variant.name}/{inside}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _import(node, where, file, variant, node in tree.body)
        elif isinstance(node, ast.Call) and node.args:
            yield from _namespace(node, where)
        elif layers and isinstance(node, ast.ClassDef) and _is_layer(node):
            yield from _layer(node, where)


def _import(
    node: ast.Import | ast.ImportFrom, where: str, file: Path, variant: Path, at_top: bool
) -> Iterator[Failure]:
    if isinstance(node, ast.ImportFrom) and node.level:
        base = file.parent
        for _ in range(node.level - 1):
            base = base.parent
        if base != variant and variant not in base.parents:
            yield Failure(where, "a relative import leaves the package", "remove a dot")
            return
        place = base.joinpath(*(node.module or "").split(".")) if node.module else base
        lost = not (place.is_dir() or place.with_suffix(".py").is_file())
        if lost and node.module != "_ops":  # `_layout` has checked that one
            fix = "add the module, or correct the name"
            yield Failure(where, f"it imports {node.module}, which is not there", fix)
        return
    listed = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
    for name in listed:
        top = (name or "").partition(".")[0]
        if top == "kernelwright":
            yield Failure(where, f"it imports {name}", "import relatively: from . import ...")
        # an import inside a function may be optional
        elif at_top and top not in IMPORTS:
            fix = "a kernel has torch, triton and the standard library; move it into a function"
            yield Failure(where, f"it imports {top}", fix)


def _namespace(node: ast.Call, where: str) -> Iterator[Failure]:
    called = ast.unparse(node.func).rpartition(".")[2]
    first = node.args[0]
    literal = first.value if isinstance(first, ast.Constant) else None
    if called == "Library" and isinstance(literal, str):
        fix = "take the name from _ops.py: editions must not share one"
        yield Failure(where, f"a namespace of fixed name {literal!r}", fix)
    if called in NAMING and isinstance(literal, str):
        fix = "wrap it in add_op_namespace_prefix(...)"
        yield Failure(where, f"{called} with the fixed name {literal!r}", fix)


def _is_layer(node: ast.ClassDef) -> bool:
    is_module = any(ast.unparse(base).rpartition(".")[2] == "Module" for base in node.bases)
    # transformers constructs a layout: it has parameters
    return is_module and not node.name.endswith("Layout")


def _layer(node: ast.ClassDef, where: str) -> Iterator[Failure]:
    flags = set()
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            if part.name == "__init__":
                fix = "read what the module has that it is put on"
                yield Failure(where, f"{node.name} has a constructor", fix)
            elif part.name != "forward":
                fix = "make it a function of the module"
                yield Failure(where, f"{node.name}.{part.name} is one member too many", fix)
        elif isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None:
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            names = {ast.unparse(t) for t in targets}
            flags |= names & FLAGS
            for name in names - FLAGS:
                fix = "a layer has no state: remove the value"
                yield Failure(where, f"{node.name}.{name} is one member too many", fix)
    if "can_torch_compile" not in flags:
        fix = "say can_torch_compile = True, or kernelize skips it under TORCH_COMPILE"
        yield Failure(where, f"{node.name} does not say whether it compiles", fix)


def _loads(folder: Path, found: list[Path]) -> list[Failure]:
    if find_spec("kernels") is None:
        fix = "pip install 'kernelwright[hub]'"
        return [Failure(folder.name, "not loaded: the package `kernels` is not there", fix)]
    from kernels import get_local_kernel

    for variant in found:
        try:
            _read_by_kernels(variant)
        except Exception as error:
            reason = " ".join(str(error).split())
            return [Failure(variant.name, f"kernels: {reason}", "build the package again")]
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        module = get_local_kernel(folder)
    except Exception as error:
        reason = " ".join(str(error).split())
        fix = "import it by hand to see where"
        return [Failure(folder.name, f"get_local_kernel: {type(error).__name__}: {reason}", fix)]
    finally:
        sys.dont_write_bytecode = before
    if not getattr(module, "__all__", None):
        return [Failure(folder.name, "no __all__", "list the functions that users may call")]
    return []


def _read_by_kernels(variant: Path) -> None:
    """Have `kernels` itself read the metadata and compare the digest, as it does when it verifies
    a signature; raises what it finds."""
    from kernels._rust import Digest, Metadata

    stated = Metadata.read_from_file(variant / "metadata.json").digest
    stated.validate(Digest.hash_variant(stated.algorithm, variant))

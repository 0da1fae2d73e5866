"""The kernels of the declared ops, under the names that profilers show."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

from ..ops import backward
from ..ops.declared_ops import internal
from ..ops.op import Composite, Op, registry

Declared = Op | Composite


def pattern() -> str:
    """A regular expression for all names: CUDA entry points, ops, Triton functions."""
    names = sorted(n for n in _launchers(_declared()) if not n.startswith("kernelwright"))
    return rf"^(kernelwright_\w+|kernelwright::\w+|({'|'.join(names)}))"


def is_ours(name: str) -> bool:
    return _compiled(pattern()).match(name) is not None


def launched_by(name: str) -> list[Declared]:
    """The declared ops that launch the kernel of this name; for `kernelwright::op`, that op."""
    known = _launchers(_declared())
    # kernels compiled ahead of time have a number behind the name
    return known.get(name) or known.get(re.sub(r"_\d+$", "", name), [])


def _declared() -> tuple[Declared, ...]:
    return (*registry().values(), *internal.values())


@functools.lru_cache(maxsize=1)
def _launchers(ops: tuple[Declared, ...]) -> dict[str, list[Declared]]:
    """Every name, and the ops that launch a kernel of this name."""
    found: dict[str, list[Declared]] = {}
    for op in ops:
        folder = _folder(op)
        cuda = [f"kernelwright_{folder.name}"] if any(folder.glob("*.cuh")) else []
        triton = [name for f in (folder, *_backward_folders(op)) for name in triton_kernels(f)]
        for name in dict.fromkeys((f"kernelwright::{op.name}", *cuda, *triton)):
            found.setdefault(name, []).append(op)
    return found


def _backward_folders(op: Declared) -> list[Path]:
    """Where the kernels of an op's gradients are: a family's, and the sums that all share."""
    if isinstance(op, Composite) or op.backward is None:
        return []
    modules = (type(op.backward).__module__, backward.__name__)
    return [Path(str(sys.modules[m].__file__)).parent for m in modules]


def _folder(op: Declared) -> Path:
    """The folder of the op's kernels: its own, or that of a kernel that several ops share."""
    if isinstance(op, Composite):
        module = op.function.__module__
    else:
        module = getattr(op.kernels, "folder", type(op.kernels).__module__)
    return Path(str(sys.modules[module].__file__)).parent


@functools.cache
def triton_kernels(folder: Path) -> frozenset[str]:
    """The Triton kernels in a folder: functions under `@triton.jit` that no other one calls. Read
    from the source, since Triton may not be installed."""
    jitted: set[str] = set()
    called: set[str] = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                jitted.add(node.name)
                calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
                called |= {f.id for f in calls if isinstance(f, ast.Name)}
    return frozenset(jitted - called)


def _is_jit(decorator: ast.expr) -> bool:
    """Whether it is `triton.jit` or `triton.jit(...)`."""
    return ast.unparse(decorator).partition("(")[0] == "triton.jit"


_compiled = functools.cache(re.compile)

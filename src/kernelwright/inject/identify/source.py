"""Fingerprints of source code: whether a function is the one a recipe was written for.

Model families in transformers hold copies of each other's code. A recipe that names code by its
fingerprint matches every copy; code that differs, in another model or in a later version of the
library, has another fingerprint and is left alone.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import FunctionType
from typing import Any

from torch import nn

# fields of the syntax tree that do not change what a function computes
IGNORED_FIELDS = {"annotation", "returns", "type_comment", "type_params", "ctx", "kind"}


@cache
def fingerprint(function: Any) -> str:
    """A hash of the code of a function and of the functions it calls by name, without annotations,
    docstrings and comments; "" if the source is not available.

    Decorators of the function itself count, those of its callees do not.
    """
    found = undecorated(function)
    try:
        outlines = None if found is None else sorted(_outlines(found, {}).items())
    except (OSError, SyntaxError, TypeError):
        outlines = None
    return "" if outlines is None else _hash(outlines)


@cache
def fingerprint_alone(functions: tuple[Any, ...]) -> str:
    """The same of several functions, without those that they call."""
    outlines = list(map(outline, functions))
    return _hash(outlines) if all(outlines) else ""


def _hash(outlines: list[Any]) -> str:
    return hashlib.sha256(repr(outlines).encode()).hexdigest()[:12]


@cache
def is_plain_loop(function: Any, blocks: str, last: str) -> bool:
    """Whether a forward passes its hidden states from block to block of `self.blocks` and then to
    `self.last`, and does nothing else to them: then a block may work ahead for the next."""
    found = undecorated(function)
    try:
        body = [] if found is None else _tree(found).body
    except (OSError, SyntaxError, TypeError):
        return False
    for loop, after in pairwise(body):
        if isinstance(loop, ast.For) and f"self.{blocks}" in ast.unparse(loop.iter):
            block = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
            states = _passed(loop.body[0], ast.unparse(block))
            alone = len(loop.body) == 1 and not loop.orelse
            return alone and states is not None and states == _passed(after, f"self.{last}")
    return False


def undecorated(found: Any) -> FunctionType | None:
    """The function inside its decorators. The package `kernels` turns some functions into modules,
    with the function in the closure of their forward."""
    if isinstance(found, nn.Module):
        found = inspect.getclosurevars(type(found).forward).nonlocals.get("func")
    found = inspect.unwrap(found) if callable(found) else None
    return found if isinstance(found, FunctionType) else None


def outline(function: Any) -> str:
    """The code of a function without annotations, docstrings and comments; "" if the source is not
    available."""
    found = undecorated(function)
    try:
        return "" if found is None else _outline(_tree(found))
    except (OSError, SyntaxError, TypeError):
        return ""


def _tree(function: FunctionType) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function.__name__} is not written with def")
    return tree


def _outlines(function: FunctionType, seen: dict[str, str]) -> dict[str, str]:
    """The outlines of a function and of those it calls by name."""
    tree = _tree(function)
    if seen:
        tree.decorator_list = []
    seen[function.__name__] = _outline(tree)
    for name in _called(tree):
        callee = undecorated(function.__globals__.get(name))
        if callee is not None and name not in seen and not callee.__module__.startswith("torch."):
            _outlines(callee, seen)
    return seen


def _called(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def _outline(node: Any) -> str:
    """A syntax tree as text that is the same in every version of Python."""
    if isinstance(node, list):
        return f"[{', '.join(map(_outline, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {
        n: v for n, v in ast.iter_fields(node) if n not in IGNORED_FIELDS and v not in (None, [])
    }
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    parts = ", ".join(f"{name}={_outline(value)}" for name, value in fields.items())
    return f"{type(node).__name__}({parts})"


def _passed(statement: ast.stmt, callee: str) -> str | None:
    """x, if a statement is `x = callee(x, ...)`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, call = statement.targets[0], statement.value
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != callee or not call.args:
        return None
    given = ast.unparse(call.args[0])
    return given if isinstance(target, ast.Name) and target.id == given else None

"""Changes the code in small ways, one at a time, and lists the changes that no test notices.

`make mutants` takes some minutes; it is no part of `make test`. A survivor is either a test that is
missing, or a change that makes no difference: read it and decide.
"""

import argparse
import ast
import contextlib
import copy
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INJECT = "kernelwright.inject"
# module: the tests that have to notice when it changes
TARGETS = {
    f"{INJECT}.runtime.work_ahead": ["test_work_ahead.py"],
    f"{INJECT}.runtime.input_key": ["test_input_key.py"],
    f"{INJECT}.graphs.key": ["test_graph_signatures.py"],
    f"{INJECT}.verify.accuracy": ["test_accuracy.py", "test_float32_run.py"],
}
SECONDS = 240  # a mutant that takes longer hangs, which a person would notice
# pytest's exit statuses that mean that tests ran: all passed, or some failed
PASSED, FAILED = 0, 1

OPPOSITE = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
}


def mutants(tree: ast.Module) -> Iterator[tuple[int, str, str, ast.Module]]:
    """(line, before, after, tree) of every change."""
    types = set(_annotations(tree))
    for place, node in enumerate(ast.walk(tree)):
        if node in types:
            continue
        for number in range(len(_changes(node))):
            changed = copy.deepcopy(tree)
            there = list(ast.walk(changed))[place]
            before = ast.unparse(there)
            _changes(there)[number]()
            after = ast.unparse(there)
            if after != before:
                yield node.lineno, before, after, changed


def _changes(node: ast.AST) -> list:
    """What can be changed in one node, each as a function that does it."""
    found = []
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
        found.append(lambda: node.ops.__setitem__(0, OPPOSITE[type(node.ops[0])]()))
    if isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in OPPOSITE:
        found.append(lambda: setattr(node, "op", OPPOSITE[type(node.op)]()))
    if isinstance(node, ast.If | ast.IfExp) and ast.unparse(node.test) != "TYPE_CHECKING":
        test = node.test
        found.append(lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), test)))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = node.value
        other = (not value) if isinstance(value, bool) else value + 1
        found.append(lambda: setattr(node, "value", other))
    if isinstance(node, ast.Return) and node.value is not None:
        found.append(lambda: setattr(node, "value", ast.Constant(None)))
    if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
        for i in range(len(node.elts)):
            found.append(lambda i=i: node.elts.pop(i))
    return found


def _annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of type annotations, which no run evaluates."""
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if (found := getattr(node, field, None)) is not None:
                yield from ast.walk(found)


class Mutated:
    """Imports one module from another syntax tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self.path, loader=self)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        exec(compile(ast.fix_missing_locations(self.tree), self.path, "exec"), vars(module))


def survives(name: str, tree: ast.Module, tests: list[str]) -> bool:
    """Whether all tests pass with this tree for the module, in a process of its own. The heavy
    libraries are imported already; what is under test is not."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        import pytest

        path = ROOT / "src" / Path(*name.split(".")).with_suffix(".py")
        sys.meta_path.insert(0, Mutated(name, path, tree))
        there = [str(ROOT / "tests/inject" / t) for t in tests]
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *there])))
    with contextlib.suppress(_TooLong), _limit(SECONDS):
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) == PASSED
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


class _TooLong(Exception):
    pass


@contextlib.contextmanager
def _limit(seconds: int):
    def stop(*_):
        raise _TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _work(job):
    name, number, tests = job
    trees = list(mutants(ast.parse(_source(name))))
    line, before, after, tree = trees[number]
    return name, line, before, after, survives(name, tree, tests)


def _source(name: str) -> str:
    return (ROOT / "src" / Path(*name.split(".")).with_suffix(".py")).read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("only", nargs="*", help="modules, by the end of their name (work_ahead)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--json", action="store_true", help="survivors as JSON, for scripts")
    given = parser.parse_args()
    chosen = {n: t for n, t in TARGETS.items() if not given.only or n.endswith(tuple(given.only))}
    if not chosen:
        parser.error(f"no module ends so; there are {', '.join(TARGETS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    os.chdir(ROOT)
    for heavy in ("torch", "pytest", "diffusers", "transformers", "peft", "accelerate"):
        with contextlib.suppress(ImportError):
            __import__(heavy)
    jobs = []
    for name, tests in chosen.items():
        if not survives(name, ast.parse(_source(name)), tests):
            sys.exit(f"the tests of {name} fail without any change: {', '.join(tests)}")
        count = len(list(mutants(ast.parse(_source(name)))))
        jobs += [(name, number, tests) for number in range(count)]
    survivors = []
    with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
        for done, (name, line, before, after, lives) in enumerate(
            pool.imap_unordered(_work, jobs), 1
        ):
            print(f"\r{done} of {len(jobs)}, {len(survivors)} survive", end="", file=sys.stderr)
            if lives:
                survivors.append({"module": name, "line": line, "before": before, "after": after})
    print(file=sys.stderr)
    survivors.sort(key=lambda s: (s["module"], s["line"]))
    if given.json:
        print(json.dumps({"mutants": len(jobs), "survivors": survivors}, indent=1))
        return
    for s in survivors:
        print(f"{s['module']}:{s['line']}: {s['before']}  ->  {s['after']}")
    print(f"{len(survivors)} of {len(jobs)} changes were noticed by no test")


if __name__ == "__main__":
    main()

"""Runs the hidden tests of a request on the package that an agent made."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...backends import Unsupported
from ...catalog import public
from ...checking.conditions import interpret_without_gpu, poisoned_memory, rounding_interpreter
from ...checking.cubins import cubins
from ...checking.emulator import Emulator, compiled, emulated
from ...checking.emulator import problem as emulator_problem
from ...checking.gradients import gradients, leaves, seeds
from ...checking.numerics import as_good_as_eager, as_tuple, errors_over_draws, widened
from ...checking.op_cases import DTYPES, tensors
from ...checking.promises import promises
from ...errors import CannotRun
from ...ops.case import Case, Inputs
from ...ops.op import Op, registry
from ...progress import Show, show_nothing
from .hidden_cases import hidden_cases
from .requests import OPTIONAL, Request

# an old and a new GPU to compile for
TARGETS = ("sm_80", "sm_90")
# the groups of hidden tests; the others hold for any op that `kernelwright new` creates
HIDDEN = ("interface", "reference", "kernel", "gradients", "refusals")
GROUPS = (*HIDDEN, "own checks", "cubins")
NARROW = 8
Test = tuple[str, Callable[[], None]]


@dataclass(frozen=True)
class Group:
    """Hidden tests of one kind: how many held, and the first failures."""

    name: str
    held: int
    total: int
    failures: tuple[str, ...] = ()
    skipped: str = ""


@dataclass(frozen=True)
class Score:
    """The result; `seen` says how kernels ran, and with it what the score means."""

    request: str
    language: str
    seen: str
    groups: tuple[Group, ...]

    @property
    def solved(self) -> bool:
        """Whether every test held, and the kernel ran in some way."""
        ran = {g.name for g in self.groups if not g.skipped}
        return "kernel" in ran and all(g.held == g.total for g in self.groups)

    @property
    def share(self) -> float:
        """The share of hidden tests that held, the mean over their groups."""
        ran = [g.held / g.total if g.total else 0.0 for g in self.groups if g.name in HIDDEN]
        return sum(ran) / len(ran)

    @property
    def verdict(self) -> str:
        """One line: solved, or what is missing."""
        if self.solved:
            return "solved"
        short = [g.name for g in self.groups if g.skipped or g.held < g.total]
        return (
            f"not solved: {self.share:.0%} of the hidden tests hold; "
            f"incomplete: {', '.join(short) or 'the kernel was not run'}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "solved": self.solved, "share": round(self.share, 3)}


def load(request: Request, folder: Path | None) -> Op:
    """The op of a package in `folder`, or with None of what is installed. Raises CannotRun if there
    is none."""
    interpret_without_gpu()
    if folder is not None:
        found = [p for p in (folder / "src", folder) if (p / request.name).is_dir()]
        if not found:
            raise CannotRun(f"{folder} has no package {request.name!r}, in it or in its src/")
        sys.path.insert(0, str(found[0].resolve()))
        try:
            importlib.import_module(request.name)
        except Exception as error:
            raise CannotRun(
                f"{request.name} cannot be imported: {type(error).__name__}: {error}"
            ) from None
    op = registry().get(request.name)
    if not isinstance(op, Op):
        raise CannotRun(f"no op {request.name!r} is declared: name its folder with --folder")
    return op


def score(
    request: Request,
    language: str,
    folder: Path | None = None,
    groups: Collection[str] = GROUPS,
    cases: Collection[str] = (),
    show: Show = show_nothing,
) -> Score:
    """Run every hidden test, or those of some groups and hidden cases; `show` is told of each."""
    op = load(request, folder)
    hidden = [c for c in hidden_cases(request) if not cases or c.name in cases]
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    emulator, why = (None, "") if on_gpu or language != "cuda" else _emulator(op, hidden)
    seen = {
        ("triton", True): "on the GPU",
        ("cuda", True): "on the GPU",
        ("triton", False): "interpreted, no GPU: the GPU's own functions and speed are not seen",
        ("cuda", False): "emulated by g++, no GPU: races, the GPU's own functions and speed are "
        "not seen",
    }[language, on_gpu]
    kernel = _Kernel(op, language, device, emulator)
    tests: dict[str, Callable[[], Iterable[Test]]] = {
        "interface": lambda: _interface(request, op, language),
        "reference": lambda: _close(request, hidden, lambda a: op.call(a, backend="torch"), device),
        "kernel": lambda: _close(request, hidden, kernel, device),
        "gradients": lambda: _gradients(request, op, hidden, device),
        "refusals": lambda: _refusals(request, op, device),
        "own checks": lambda: ((p.name, p.hold) for p in promises(op, device)),
        "cubins": lambda: [(a, functools.partial(_compiles, op, language, a)) for a in TARGETS],
    }
    found = [
        Group(name, 0, 0, skipped=why)
        if name == "kernel" and why
        else _group(name, tests[name](), show)
        for name in groups
    ]
    return Score(request.name, language, seen, tuple(found))


def _group(name: str, tests: Iterable[Test], show: Show) -> Group:
    failures, all_tests = [], list(tests)
    step = show(name, len(all_tests))
    for label, hold in all_tests:
        try:
            with poisoned_memory(), rounding_interpreter(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hold()
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            failures.append(f"{label}: {said}")
        step()
    return Group(name, len(all_tests) - len(failures), len(all_tests), tuple(failures))


@dataclass(frozen=True)
class _Kernel:
    """A call of the kernel of one language."""

    op: Op
    language: str
    device: str
    emulator: Emulator | None

    def __call__(self, arguments: dict[str, Any]) -> Any:
        if self.emulator is None:
            return self.op.call(arguments, backend=self.language)
        got = emulated(self.emulator, self.op, arguments)
        if got is None:
            raise AssertionError("the kernel does not support this call")
        return got


def _emulator(op: Op, hidden: Iterable[Case]) -> tuple[Emulator | None, str]:
    why = emulator_problem()
    if why is None:
        calls = [(c.arguments(Inputs(d)), None) for c in hidden for d in DTYPES]
        try:
            return compiled(op, calls), ""
        except Unsupported as no:
            why = str(no)
        except Exception as error:
            why = (str(error).strip().splitlines() or ["?"])[0]
    return None, why


def _interface(request: Request, op: Op, language: str) -> Iterator[Test]:
    function = public(op)
    parameters = inspect.signature(function).parameters

    def language_alone() -> None:
        assert language in op.backends, f"it has {', '.join(op.backends)}"

    def no_other() -> None:
        (other,) = {"triton", "cuda"} - {language}
        assert other not in op.backends, f"{other} was not asked for"

    def names() -> None:
        own = tuple(n for n in parameters if n not in ("out", "exact", "backend", "inplace"))
        assert own == request.arguments, f"it takes {', '.join(parameters)}"

    def defaults() -> None:
        expected: dict[str, float | None] = {n: v[0] for n, v in request.numbers.items()}
        expected |= {n: None for n, kind in request.tensors.items() if kind == OPTIONAL}
        got = {n: parameters[n].default for n in expected if n in parameters}
        assert got == expected, f"{got}, expected {expected}"

    def options() -> None:
        missing = {"out", "backend"} - set(parameters)
        assert not missing, f"{' and '.join(sorted(missing))} missing"

    def documented() -> None:
        assert ">>>" in (function.__doc__ or ""), "no example"

    def backward() -> None:
        assert op.backward is not None, "no backward= is declared"

    yield f"{language} is there", language_alone
    yield "no other language", no_other
    yield "arguments", names
    yield "defaults", defaults
    yield "out= and backend=", options
    yield "an example", documented
    if request.by_kernels(language):
        yield "backward= is declared", backward


def _close(
    request: Request, hidden: Iterable[Case], call: Callable[[dict[str, Any]], Any], device: str
) -> Iterator[Test]:
    """As close to float64 as eager, in every hidden case and dtype."""
    for case in hidden:
        for dtype in DTYPES:

            def hold(case: Case = case, dtype: torch.dtype = dtype) -> None:
                arguments = case.arguments(Inputs(dtype, device))
                got = call(arguments)
                eager, truth = _compared(request, arguments)

                def draw(seed: int) -> tuple[Tensor, Tensor]:
                    return _compared(request, case.arguments(Inputs(dtype, device, seed)))

                assert as_tuple(got)[0].dtype == dtype, "another dtype came back"
                as_good_as_eager(got, truth, eager, errors_over_draws(draw, dtype))

            yield f"{case.name}, {str(dtype).removeprefix('torch.')}", hold


def _compared(request: Request, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(eager, truth)"""
    wide = {n: widened(a) for n, a in arguments.items()}
    return request.eager(**arguments), request.truth(**wide)


def _gradients(request: Request, op: Op, hidden: Iterable[Case], device: str) -> Iterator[Test]:
    """By the backend that autograd chooses; where the request asks for kernels, by Triton's. Rows
    of a few elements are left out: the gradient of a norm of one is what cancellation leaves."""
    backend = "triton" if request.backward and "triton" in op.backends else None
    for case in hidden:
        given = tensors(case.arguments(Inputs(torch.float32, "meta"))).values()
        if not all(t.numel() and t.shape[-1] >= NARROW for t in given):
            continue
        for dtype in (torch.bfloat16, torch.float32):

            def hold(case: Case = case, dtype: torch.dtype = dtype) -> None:
                given, wanted = leaves(case.arguments(Inputs(dtype, device)))
                got = gradients(op.call(given, backend=backend), wanted)

                def draw(seed: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
                    return _derived(request, case.arguments(Inputs(dtype, device, seed)), dtype)

                eager, truth = draw(0)
                as_good_as_eager(got, truth, eager, errors_over_draws(draw, dtype))

            yield f"{case.name}, {str(dtype).removeprefix('torch.')}", hold


def _derived(
    request: Request, arguments: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The gradients of eager, and those of the truth in float64."""
    given, wanted = leaves({n: widened(a) for n, a in arguments.items()})
    out = request.truth(**given)
    incoming = seeds([out], dtype)
    truth = gradients(out, wanted, [g.double() for g in incoming])
    given, wanted = leaves(arguments)
    eager = gradients(request.eager(**given), wanted, incoming)
    return eager, truth


def _refusals(request: Request, op: Op, device: str) -> Iterator[Test]:
    """A wrong argument raises an error that names the op and the argument."""
    (first, *_) = (c for c in hidden_cases(request) if c.name == "rows")
    right = first.arguments(Inputs(torch.float32, device))
    wrong: dict[str, Any] = {}
    rows = tensors(right)
    for name, t in rows.items():
        wrong[f"{name} of integers"] = {name: t.to(torch.int64)}
        wrong[f"{name} is a number"] = {name: 2.0}
        if len(rows) > 1 and t is not next(iter(rows.values())):
            wrong[f"{name} of another width"] = {name: torch.ones(7, device=device)}
    for name, value in request.limits.items():
        wrong[f"{name}={value!r}"] = {name: value}
    for name in request.numbers:
        wrong[f"{name} is a tensor"] = {name: torch.ones(())}
        wrong[f"{name} is infinite"] = {name: float("inf")}
    for label, change in wrong.items():

        def hold(change: dict[str, Any] = change) -> None:
            (name,) = change
            try:
                op.call(right | change)
            except (TypeError, ValueError) as error:
                said = str(error)
                assert said.startswith(f"{op.name}: "), f"the error does not name the op: {said}"
                assert name in said, f"the error does not name {name}: {said}"
            else:
                raise AssertionError("it was accepted")

        yield label, hold


def _compiles(op: Op, language: str, arch: str) -> None:
    found = cubins(op, language, (arch,))
    assert found, "no kernel was compiled"
    spilled = [c.kernel for c in found if c.used.spills]
    assert not spilled, f"registers spill: {spilled[0]}"

"""What an op is: one declaration, from which everything else about it follows.

A folder declares `Op(name=..., schema=..., reference=..., kernels=...)`. From that come the input
checks, the choice of a backend, the fast eager path, the torch.library registration with its fake
kernel and gradient, and the registry that tests, benchmarks and `kernelwright ops` read.

The eager path is a dictionary look-up. A call's *signature* (shapes, strides, dtypes, device and
plain values) decides everything but the addresses, so checks, backend choice, kernel build, grid
and scalar arguments are worked out once a signature and kept as a plan; a later call allocates
its output and launches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import backends
from ..backends import Launch, Target, Unsupported
from . import checks, library
from .case import Case, Sized

BACKENDS = ("auto", "torch", "triton", "cuda")
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
# signatures kept an op; a service that sees ever new sequence lengths starts over rather than grow
MAX_PLANS = 4096

_registry: dict[str, Op | Composite] = {}
_backend: ContextVar[str] = ContextVar("kernelwright_backend", default="auto")
# Dynamo cannot trace a ContextVar: a graph either sits inside `use_backend`, which then is on this
# stack while it is traced, or asks what surrounds it each time it runs
_traced_backends: list[str] = []
SURROUNDING = ""


class Kernels(Protocol):
    """The kernels of an op: what to launch for one signature, on Triton and on CUDA C++."""

    def triton(self, call: Call) -> Launch: ...
    def cuda(self, call: Call) -> Launch: ...


class Call(dict[str, Any]):
    """One call as a kernel planner sees it: arguments and outputs by name, and what to aim for."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        op: str,
        exact: str | None,
        target: Target,
        alignment: int = 16,
    ) -> None:
        super().__init__(values)
        self.op = op
        self.exact = exact
        self.target = target
        self.alignment = alignment


@dataclass(frozen=True)
class Choice:
    """A backend and the reason it was chosen, as `kernelwright doctor` prints it."""

    backend: str
    reason: str


@dataclass(eq=False)
class Op:
    """One op. `schema` is a torch.library schema; `exact` maps names to the eager chains whose bits
    the CUDA kernels reproduce; `allocate` makes the outputs for given inputs; `sized` makes inputs
    of any number of rows and width, for the table of exact widths."""

    name: str
    schema: str
    formula: str
    check: Callable[..., None]
    allocate: Callable[..., tuple[Tensor, ...]]
    reference: Callable[..., Any]
    kernels: Kernels
    cases: Sequence[Case]
    sized: Sized
    outputs: tuple[str, ...] = ("out",)
    exact: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    inplace: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ("triton", "cuda")
    backends: tuple[str, ...] = ("torch", "triton", "cuda")

    def __post_init__(self) -> None:
        self.arguments = library.argument_names(self.name, self.schema)
        self._plans: dict[Any, Callable[[tuple[Any, ...], Any], Any]] = {}
        self.library_op = library.register(self)
        self.inplace_op = library.register_inplace(self) if self.inplace else None
        _registry[self.name] = self

    def __call__(
        self,
        *args: Any,
        out: Any = None,
        exact: str | None = None,
        backend: str | None = None,
        inplace: bool = False,
    ) -> Any:
        if torch.compiler.is_compiling():
            if backend is None:
                backend = _traced_backends[-1] if _traced_backends else SURROUNDING
            return self._traced(args, out, exact, backend, inplace)
        if backend is None:
            backend = _backend.get()
        if torch._C._len_torch_dispatch_stack():  # a dispatch mode is to see the op
            return self._dispatched(args, out, exact, backend, inplace)
        grad = torch.is_grad_enabled()
        for a in args:
            if isinstance(a, Tensor) and (type(a) not in PLAIN or (grad and a.requires_grad)):
                return self._dispatched(args, out, exact, backend, inplace)
        return self.compute(args, out, exact, backend, inplace)

    def compute(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str, inplace: bool
    ) -> Any:
        """Run on real tensors, below autograd: find the plan of this signature and follow it."""
        key: list[Any] = [exact, backend, inplace]
        try:
            for a in args:
                if isinstance(a, Tensor):
                    key.append((a.shape, a.stride(), a.dtype, a.device))
                else:
                    key.append(a)
            if out is not None:
                for o in out if type(out) is tuple else (out,):
                    key.append(None if o is None else (o.shape, o.stride(), o.dtype, o.device))
            signature = tuple(key)
            plan = self._plans.get(signature)
        except (TypeError, AttributeError, RuntimeError):
            # unhashable, no tensor, or one without strides: let the checks name the argument
            self.validate(args, out, exact, backend, inplace)
            raise
        if plan is None:
            plan = self._plan(args, out, exact, backend, inplace)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[signature] = plan
        return plan(args, out)

    @staticmethod
    def surrounding() -> str:
        """The backend of the `use_backend` around this call."""
        return _backend.get()

    def call(self, arguments: Mapping[str, Any], **how: Any) -> Any:
        """Call by argument name; what tests, benchmarks and tables use."""
        return self(*(arguments[n] for n in self.arguments), **how)

    # the two slow roads: through the dispatcher

    def _dispatched(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str, inplace: bool
    ) -> Any:
        """Autograd, tensor subclasses and dispatch modes see the op as torch.ops.kernelwright.*"""
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(a, Tensor) and a.requires_grad for a in args
        )
        if needs_grad and (out is not None or inplace):
            what = "out=" if out is not None else "inplace=True"
            raise ValueError(
                f"{self.name}: {what} cannot be recorded for autograd; "
                f"leave it out, or call under torch.no_grad()"
            )
        return self._traced(args, out, exact, backend, inplace)

    def _traced(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str, inplace: bool
    ) -> Any:
        if inplace:
            assert self.inplace_op is not None
            self.inplace_op(*args, exact or "", backend)
            changed = tuple(args[self.arguments.index(n)] for n in self.inplace)
            return changed[0] if len(changed) == 1 else changed
        result = self.library_op(*args, exact or "", backend)
        if out is None:
            return result
        single = not isinstance(out, tuple)
        given = (out,) if single else out
        results = (result,) if single else result
        checks.outputs(self.name, self.outputs, given, results, args)
        kept = tuple(
            r if o is None else o.copy_(r) for o, r in zip(given, results, strict=True)
        )
        return kept[0] if single else kept

    # the first call of a signature

    def _plan(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str, inplace: bool
    ) -> Callable[[tuple[Any, ...], Any], Any]:
        given = self.validate(args, out, exact, backend, inplace)
        choice = self.choose(args, exact, backend)
        if choice.backend == "torch":
            return self._eager_plan(args, exact, inplace)
        how = _How(exact, choice.backend, inplace, strict=backend != "auto")
        return self.launch_plan(args, given, how)

    def launch_plan(
        self, args: tuple[Any, ...], out: Any, how: _How, alignment: int = 16
    ) -> Callable[[tuple[Any, ...], Any], Any]:
        """A plan that launches a kernel; where none serves, an error or, unasked, plain PyTorch."""
        try:
            return _LaunchPlan(self, args, out, how, alignment)
        except Unsupported as no:
            if how.strict:
                raise ValueError(
                    f"{self.name}: backend {how.backend!r} cannot run this: {no}"
                ) from no
            chain = f"the eager chain {how.exact!r}" if how.exact else "the PyTorch reference"
            warnings.warn(f"{self.name}: {no}; running {chain} instead", stacklevel=5)
            return self._eager_plan(args, how.exact, how.inplace)

    def _eager_plan(
        self, args: tuple[Any, ...], exact: str | None, inplace: bool
    ) -> Callable[[tuple[Any, ...], Any], Any]:
        function = self.exact[exact] if exact else self.reference
        if exact:
            self._refuse_promotion(args, exact)
        changed = [self.arguments.index(n) for n in self.inplace]

        def run(args: tuple[Any, ...], out: Any) -> Any:
            result = function(*args)
            if inplace:
                out = tuple(args[i] for i in changed)
                out = out if len(out) > 1 else out[0]
            if out is None:
                # with every part absent a chain may hand back its input; an op returns new memory
                return result.clone() if any(result is a for a in args) else result
            if not isinstance(out, tuple):
                return out.copy_(result)
            return tuple(
                r if o is None else o.copy_(r) for o, r in zip(out, result, strict=True)
            )

        return run

    def _refuse_promotion(self, args: tuple[Any, ...], exact: str) -> None:
        """An eager chain may promote tensors of mixed dtypes; the op's result has one dtype."""
        metas = [a.detach().to("meta") if isinstance(a, Tensor) else a for a in args]
        eager = self.exact[exact](*metas)
        eager = eager if isinstance(eager, tuple) else (eager,)
        for name, e, o in zip(self.outputs, eager, self.allocate(*metas), strict=True):
            if e.dtype != o.dtype:
                raise ValueError(
                    f"{self.name}: exact is {exact!r}, and PyTorch promotes {name} to {e.dtype} "
                    f"there; pass tensors of one dtype"
                )

    def validate(
        self,
        args: tuple[Any, ...],
        out: Any = None,
        exact: str | None = None,
        backend: str = "auto",
        inplace: bool = False,
    ) -> tuple[Tensor | None, ...] | None:
        """Raise a ValueError or TypeError that names the argument if the call is wrong."""
        if backend not in BACKENDS:
            raise ValueError(f"{self.name}: backend is {backend!r}, expected one of {BACKENDS}")
        if exact and exact not in self.exact:
            names = ", ".join(map(repr, self.exact)) or "none"
            raise ValueError(f"{self.name}: exact is {exact!r}, known chains are {names}")
        checks.common(self.name, dict(zip(self.arguments, args, strict=True)))
        self.check(*args)
        if inplace:
            changed = [args[self.arguments.index(n)] for n in self.inplace]
            checks.outputs(self.name, self.inplace, changed, changed, args)
        if out is None:
            return None
        given = out if isinstance(out, tuple) else (out,)
        with torch.no_grad():
            wanted = self.allocate(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        checks.outputs(self.name, self.outputs, given, wanted, args)
        return given

    def choose(self, args: tuple[Any, ...], exact: str | None, backend: str = "auto") -> Choice:
        """The backend that runs this call, and why."""
        tensor = next(a for a in args if isinstance(a, Tensor))
        return self.choose_for(tensor.device, tensor.dtype, exact, backend)

    def choose_for(
        self,
        device: torch.device,
        dtype: torch.dtype,
        exact: str | None = None,
        backend: str = "auto",
    ) -> Choice:
        """The backend for tensors of this device and dtype, and why."""
        if backend == "torch":
            return Choice("torch", "asked for by name")
        if backend != "auto":
            problem = self._problem(backend, device, dtype, exact)
            if problem:
                raise ValueError(f"{self.name}: backend {backend!r}: {problem}")
            return Choice(backend, "asked for by name")
        if device.type != "cuda":
            return Choice("torch", f"tensors on {device.type}: plain PyTorch")
        order = ("cuda",) if exact else self.prefer
        problems = []
        for name in order:
            problem = self._problem(name, device, dtype, exact)
            if problem is None:
                why = "keeps the bits of eager" if exact else "fastest measured for this op"
                return Choice(name, why if not problems else "; ".join(problems))
            problems.append(f"{name}: {problem}")
        reason = "; ".join(problems)
        if dtype != torch.float64:
            warnings.warn(f"{self.name}: running plain PyTorch ({reason})", stacklevel=5)
        return Choice("torch", reason)

    def _problem(
        self, backend: str, device: torch.device, dtype: torch.dtype, exact: str | None
    ) -> str | None:
        if dtype == torch.float64:
            return "float64 runs in plain PyTorch"
        if exact and backend == "triton":
            return "Triton cannot fix the order of a sum; exact modes need the cuda backend"
        return backends.problem(backend, device, dtype)


@dataclass(eq=False)
class Composite:
    """A public function made of other ops or of PyTorch's own: listed, tested and timed like an op,
    with no kernel or torch.library entry of its own."""

    name: str
    formula: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    cases: Sequence[Case]
    exact: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    backends: tuple[str, ...] = ("torch",)

    def __post_init__(self) -> None:
        _registry[self.name] = self

    def call(self, arguments: Mapping[str, Any], **how: Any) -> Any:
        return self.function(**arguments, **how)


@dataclass(frozen=True)
class _How:
    """What a call asks for besides its arguments; `strict` if it named the backend itself."""

    exact: str | None
    backend: str
    inplace: bool
    strict: bool


class _LaunchPlan:
    """A signature whose kernel is built: allocate, collect addresses, launch."""

    def __init__(
        self,
        op: Op,
        args: tuple[Any, ...],
        out: tuple[Tensor | None, ...] | None,
        how: _How,
        alignment: int,
    ) -> None:
        self.op, self.how, self.inplace = op, how, how.inplace
        # rows are read along the last dimension; anything else is copied once before the launch
        self.copied = [i for i, a in enumerate(args) if isinstance(a, Tensor) and _gaps(a)]
        if self.inplace and self.copied:
            name = op.arguments[self.copied[0]]
            raise ValueError(f"{op.name}: inplace=True needs {name} to have stride 1 in its last dim")
        args = self._dense(args)
        outs = self._outputs(args, out)
        tensor = next(a for a in args if isinstance(a, Tensor))
        self.device = tensor.get_device()
        self.guarded = self.device >= 0 and torch.cuda.device_count() > 1
        self.realigned: dict[int, Callable[[tuple[Any, ...], Any], Any]] = {}
        names = (*op.arguments, *op.outputs)
        values = dict(zip(names, (*args, *outs), strict=True))
        if all(o is None or o.numel() == 0 for o in outs):
            self.launch = None
            return
        target = Target.of(tensor.device)
        call = Call(values, op=op.name, exact=how.exact, target=target, alignment=alignment)
        launch: Launch = getattr(op.kernels, how.backend)(call)
        self.mask = launch.alignment - 1
        self.slots = [
            names.index(n) if n and values[n] is not None else -1 for n in launch.pointers
        ]
        self.absent = launch.absent
        self.launch = backends.load(launch, values, tensor.device, op.name)

    def _dense(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.copied:
            return args
        return tuple(a.contiguous() if i in self.copied else a for i, a in enumerate(args))

    def _outputs(self, args: tuple[Any, ...], out: Any) -> tuple[Tensor, ...]:
        if self.inplace:
            return tuple(args[self.op.arguments.index(n)] for n in self.op.inplace)
        fresh = self.op.allocate(*args) if out is None or None in out else out
        if out is None:
            return fresh
        return tuple(f if o is None else o for o, f in zip(out, fresh, strict=True))

    def __call__(self, args: tuple[Any, ...], out: Any) -> Any:
        if self.copied:
            args = self._dense(args)
        if out is None and not self.inplace:
            outs = self.op.allocate(*args)
        else:
            outs = self._outputs(args, out if out is None or type(out) is tuple else (out,))
        if self.launch is not None:
            tensors = args + outs
            if self.device < 0:  # Triton's interpreter takes the tensors themselves
                self.launch([None if i < 0 else tensors[i] for i in self.slots])
                return outs[0] if len(outs) == 1 else outs
            pointers = []
            bits = 0
            for i in self.slots:
                if i < 0:
                    pointers.append(self.absent)
                else:
                    p = tensors[i].data_ptr()
                    bits |= p
                    pointers.append(p)
            if bits & self.mask:
                return self._realigned(bits & self.mask, args, outs)
            if self.guarded and torch.cuda.current_device() != self.device:
                with torch.cuda.device(self.device):
                    self.launch(pointers)
            else:
                self.launch(pointers)
        return outs[0] if len(outs) == 1 else outs

    def _realigned(self, bits: int, args: tuple[Any, ...], outs: tuple[Tensor, ...]) -> Any:
        """Follow the plan for addresses that are only multiples of the lowest set bit."""
        alignment = bits & -bits
        plan = self.realigned.get(alignment)
        if plan is None:
            plan = self.op.launch_plan(args, outs, self.how, alignment)
            self.realigned[alignment] = plan
        return plan(args, outs if len(outs) > 1 or isinstance(plan, _LaunchPlan) else outs[0])


def _gaps(t: Tensor) -> bool:
    return t.ndim > 0 and t.shape[-1] > 1 and t.stride(-1) != 1


@contextmanager
def use_backend(backend: str) -> Any:
    """Run every op in the block on one backend: "auto", "torch", "triton" or "cuda".

    >>> with use_backend("torch"):
    ...     y = rmsnorm(x)
    """
    if backend not in BACKENDS:
        raise ValueError(f"use_backend: backend is {backend!r}, expected one of {BACKENDS}")
    if torch.compiler.is_compiling():
        _traced_backends.append(backend)
        try:
            yield
        finally:
            _traced_backends.pop()
        return
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def registry() -> dict[str, Op | Composite]:
    """Every declared op by name."""
    return dict(sorted(_registry.items()))

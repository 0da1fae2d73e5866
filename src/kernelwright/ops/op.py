"""What an op is: one declaration, from which everything else about it follows.

A folder declares `Op(name=..., schema=..., reference=..., kernels=...)`. From that come the input
checks, the choice of a backend, the fast eager path, the torch.library registration with its fake
kernel and gradient, and the registry that tests, benchmarks and `kernelwright ops` read.

The eager path is a dictionary look-up. A call's *signature* (shapes, strides, dtypes, device and
plain values) decides everything but the addresses. So checks, backend choice, kernel build, grid
and scalar arguments are worked out once per signature and cached as a plan; later calls allocate
the output and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..backends import Launch, Unsupported
from ..backends.torch_internals import dispatch_modes
from ..backends.user_warnings import warn
from . import checks, gradient, hub_servers, library, plugins, selection
from .backward import Backward
from .call_codegen import compile_call, compile_key
from .case import Case, Inputs, Sized
from .composite import Composite
from .declared_ops import declared, internal
from .plan import Call, How, LaunchPlan, Plan, eager_plan
from .plan_cache import PlanCache, layouts, remember
from .selection import BACKENDS, Choice, use_backend
from .transforms import refuse_kernels, transformed

__all__ = ["Call", "Choice", "Composite", "Op", "registry", "use_backend"]


class Kernels(Protocol):
    """The kernels of an op: each method plans the launch for one signature."""

    def triton(self, call: Call) -> Launch: ...
    def cuda(self, call: Call) -> Launch: ...


@dataclass(eq=False)
class Op:
    """One op. `schema` is a torch.library schema; `exact` maps names to the eager chains whose bits
    the CUDA kernels reproduce; `allocate` makes the outputs for given inputs; `sized` makes inputs
    with any number of rows and any width, for the table of exact widths; `prefer` is the measured
    order in which backends are tried on a GPU, or a function of the arguments that returns it;
    `backward` computes the gradients; without it the reference is differentiated. An `internal` op
    is a step of another one: it has no public function and is not listed. `category` is the op's
    row in profiles, if its name does not say it."""

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
    prefer: tuple[str, ...] | Callable[..., tuple[str, ...]] = ("triton", "cuda")
    backends: tuple[str, ...] = ("torch", "triton", "cuda")
    backward: Backward | None = None
    internal: bool = False
    category: str | None = None
    eight: tuple[str, ...] = ()  # the arguments that are float8_e4m3fn or int8
    integers: tuple[str, ...] = ()  # the arguments that are int64
    # the arguments that every call writes to, marked in the schema; no gradient is recorded
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        arguments = library.arguments(self.schema)
        self.arguments = tuple(name for name, _ in arguments)
        self._kinds = arguments
        self._key = compile_key(arguments)
        self._plans: PlanCache[Plan] = {}
        self.run: Callable[..., Any] = compile_call(self, arguments)
        self.library_op: Callable[..., Any] = library.register(self)
        self.unrecorded_op: Callable[..., Any] = library.register_unrecorded(self)
        gradient.record(self)
        self.inplace_op = library.register_inplace(self) if self.inplace else None
        (internal if self.internal else declared)[self.name] = self

    def __call__(
        self,
        *args: Any,
        out: Any = None,
        exact: str | None = None,
        backend: str | None = None,
        inplace: bool = False,
    ) -> Any:
        return self.run(*args, out, exact, backend, inplace)

    def slow_call(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str | None, inplace: bool
    ) -> Any:
        """A call that is traced, needs the dispatcher, has no plan yet, or has wrong arguments."""
        checks.how(self.name, exact, self.exact, backend, BACKENDS)
        checks.choice(self.name, "inplace", inplace, (True, False))
        if torch.compiler.is_compiling():
            backend = selection.traced() if backend is None else backend
            return self._traced(args, out, exact, backend, inplace)
        if backend is None:
            backend = selection.current.get()
        checks.kinds(self.name, self._kinds, args)
        try:
            # a dispatch mode has to see the op, or torch.func transforms it
            if dispatch_modes() or transformed(args):
                return self._dispatched(args, out, exact, backend, inplace)
            key = self._key(args, exact, backend, inplace)
            if key is None:
                return self._dispatched(args, out, exact, backend, inplace)
            hash(key if out is None else (key, layouts(out)))
        except Exception as error:
            # an unhashable or unusable argument: the checks raise an error that names it
            if not str(error).startswith(f"{self.name}: "):
                self.validate(args, out, exact, backend, inplace)
            raise
        return self.compute(args, out, exact, backend, inplace)

    def compute(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str, inplace: bool
    ) -> Any:
        """Run on real tensors, below autograd: find or make the plan of the call, and follow it."""
        with torch.no_grad():
            key = self._key(args, exact, backend, inplace)
        if key is None:  # a subclass that the dispatcher passed down to here counts as a tensor
            return self._plan(args, out, exact, backend, inplace)(args, out)
        key = key if out is None else (key, layouts(out))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(args, out, exact, backend, inplace)
            remember(self._plans, key, plan)
        return plan(args, out)

    def in_steps(self, args: tuple[Any, ...], exact: str | None, backend: str) -> Any:
        """Run the reference, or the eager chain, as PyTorch ops, which torch.func can transform."""
        self.validate(args, None, exact, backend)
        refuse_kernels(self.name, backend)
        self._refuse_promotion(args, exact)
        return eager_plan(self, How(exact, "torch", inplace=False, strict=True))(args, None)

    def call(self, arguments: Mapping[str, Any], **how: Any) -> Any:
        """Call by argument name, for tests, benchmarks and tables."""
        return self(*(arguments[n] for n in self.arguments), **how)

    # calls through the dispatcher

    def _dispatched(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str, inplace: bool
    ) -> Any:
        """Call torch.ops.kernelwright.*, for autograd, tensor subclasses and dispatch modes."""
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(a, Tensor) and a.requires_grad for a in args
        )
        if out is not None or inplace:
            what = "out=" if out is not None else "inplace=True"
            if needs_grad:
                raise ValueError(
                    f"{self.name}: {what} cannot be recorded for autograd; "
                    f"leave it out, or call under torch.no_grad()"
                )
            if transformed(args):
                raise ValueError(
                    f"{self.name}: {what} cannot be transformed by torch.func or forward-mode "
                    f"differentiation; leave it out"
                )
            if inplace:
                changed = [args[self.arguments.index(n)] for n in self.inplace]
                checks.outputs(self.name, self.inplace, changed, changed, args)
        return self._traced(args, out, exact, backend, inplace)

    def _traced(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str, inplace: bool
    ) -> Any:
        if inplace:
            assert self.inplace_op is not None
            self.inplace_op(*args, exact or "", backend)
            changed = tuple(args[self.arguments.index(n)] for n in self.inplace)
            return changed[0] if len(changed) == 1 else changed
        unrecorded = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        through = self.unrecorded_op if unrecorded else self.library_op
        result = through(*args, exact or "", backend)
        if out is None:
            return result
        given = self._given(out)
        single = len(given) == 1
        results = (result,) if single else result
        checks.outputs(self.name, self.outputs, given, results, args)
        kept = tuple(r if o is None else o.copy_(r) for o, r in zip(given, results, strict=True))
        return kept[0] if single else kept

    # the first call of a signature

    def _plan(
        self, args: tuple[Any, ...], out: Any, exact: str | None, backend: str, inplace: bool
    ) -> Plan:
        given = self.validate(args, out, exact, backend, inplace)
        choice = self.choose(args, exact, backend)
        how = How(exact, choice.backend, inplace, strict=backend != "auto")
        if choice.backend == "hub":
            server = hub_servers.server(self.name)
            assert server is not None
            return eager_plan(self, how, args, server.run)
        if choice.backend == "torch":
            self._refuse_promotion(args, exact)
            return eager_plan(self, how, args)
        return self.launch_plan(args, given, how)

    def launch_plan(self, args: tuple[Any, ...], out: Any, how: How, alignment: int = 16) -> Plan:
        """A plan that launches a kernel. If no kernel can run this: an error where the call named
        the backend, else plain PyTorch with a warning."""
        try:
            return LaunchPlan(self, args, out, how, alignment).follow
        except Unsupported as no:
            if how.strict:
                raise ValueError(
                    f"{self.name}: backend {how.backend!r} cannot run this: {no}"
                ) from no
            chain = f"the eager chain {how.exact!r}" if how.exact else "the PyTorch reference"
            warn(f"{self.name}: {no}; running {chain} instead")
            self._refuse_promotion(args, how.exact)
            return eager_plan(self, how, args)

    def _refuse_promotion(self, args: tuple[Any, ...], exact: str | None) -> None:
        """Raise if the eager chain would promote mixed dtypes: the op's result has one dtype."""
        if exact is None:
            return
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
        """Raise a ValueError or TypeError that names a wrong argument. Returns `out` as a tuple."""
        checks.how(self.name, exact, self.exact, backend, BACKENDS)
        checks.choice(self.name, "inplace", inplace, (True, False))
        checks.kinds(self.name, self._kinds, args)
        named = dict(zip(self.arguments, args, strict=True))
        checks.common(self.name, named, self.eight, self.integers)
        self.check(*args)
        if inplace:
            changed = [args[self.arguments.index(n)] for n in self.inplace]
            checks.outputs(self.name, self.inplace, changed, changed, args)
        if out is None:
            return None
        given = self._given(out)
        with torch.no_grad():
            wanted = self.allocate(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        checks.outputs(self.name, self.outputs, given, wanted, args)
        return given

    def _given(self, out: Any) -> tuple[Any, ...]:
        """`out` as a tuple: a single output is passed by itself, several as a tuple."""
        names = self.outputs
        if len(names) == 1:
            if isinstance(out, tuple):
                raise TypeError(f"{self.name}: {names[0]} is a tuple, expected a tensor")
            return (out,)
        if not isinstance(out, tuple) or len(out) != len(names):
            raise TypeError(
                f"{self.name}: out is {checks.shown(out)}, expected a tuple of {', '.join(names)}"
            )
        return out

    def choose(self, args: tuple[Any, ...], exact: str | None, backend: str = "auto") -> Choice:
        """The backend that runs this call, and why."""
        from_hub = hub_servers.choose(self.name, args, exact, backend)
        if from_hub is not None:
            return from_hub
        tensor = next(a for a in args if isinstance(a, Tensor))
        order = self.prefer(*args) if callable(self.prefer) else self.prefer
        return self._choose(order, tensor.device, tensor.dtype, exact, backend)

    def choose_for(
        self,
        device: torch.device,
        dtype: torch.dtype,
        exact: str | None = None,
        backend: str = "auto",
    ) -> Choice:
        """The backend for tensors of this device and dtype, and why. If the choice depends on the
        shape: for the first shape of a model, or else the last case."""
        if not callable(self.prefer):
            return self._choose(self.prefer, device, dtype, exact, backend)
        case = next((c for c in self.cases if c.large), self.cases[-1])
        arguments = case.arguments(Inputs(dtype, "meta"))
        order = self.prefer(*(arguments[n] for n in self.arguments))
        choice = self._choose(order, device, dtype, exact, backend)
        free = exact is None and backend == "auto" and choice.backend in order
        return Choice(choice.backend, f"{choice.reason}, by the shape") if free else choice

    def _choose(
        self,
        order: tuple[str, ...],
        device: torch.device,
        dtype: torch.dtype,
        exact: str | None,
        backend: str,
    ) -> Choice:
        """Choose among the backends that this op has a kernel for."""
        kind = "cuda" if backend == "aot" else backend
        if kind in ("triton", "cuda") and kind not in self.backends:
            has = ", ".join(self.backends)
            raise ValueError(f"{self.name}: backend {backend!r}: this op has {has}")
        if exact and backend == "auto" and "cuda" not in self.backends:
            return Choice("torch", "the eager chain itself: no kernel of this op keeps its bits")
        order = tuple(b for b in order if b in self.backends)
        return selection.choose(self.name, order, device, dtype, exact, backend)

    def forget(self) -> None:
        """Clear the cached plans, after something that they depend on has changed."""
        self._plans.clear()


def registry() -> dict[str, Op | Composite]:
    """Every declared op by name, those of other packages included."""
    plugins.load()
    return dict(sorted(declared.items()))

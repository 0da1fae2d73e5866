"""A plan: what a call of one signature does, worked out once.

The first call of a signature checks its arguments, chooses a backend, builds a kernel and leaves a
plan. Following the plan allocates the outputs, collects addresses and launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import backends
from ..backends import Launch, Target, Unsupported
from .call_codegen import compile_follow
from .op_protocol import DeclaredOp
from .rows import has_gaps, with_dense_rows

Plan = Callable[[tuple[Any, ...], Any], Any]


class Call(dict[str, Any]):
    """One call as a kernel planner sees it: arguments and outputs by name, and the target GPU."""

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
class How:
    """The options of a call; `strict` if the caller named the backend."""

    exact: str | None
    backend: str
    inplace: bool
    strict: bool


def eager_plan(
    op: DeclaredOp,
    how: How,
    args: tuple[Any, ...] = (),
    function: Callable[..., Any] | None = None,
) -> Plan:
    """Run `function`, by default the reference, or the eager chain that `exact` names. Results of
    arguments like `args` are laid out as a kernel's are."""
    if function is None:
        function = op.exact[how.exact] if how.exact else op.reference
    likes = _layouts_of_kernels(op, args)

    def run(args: tuple[Any, ...], out: Any) -> Any:
        if how.inplace:
            out = changed(op, args)
            out = out if len(out) > 1 else out[0]
        result = function(*args)
        if out is None:
            # a chain whose parts are all absent returns its input; an op returns new memory
            for a in args:
                if result is a:
                    result = result.clone()
                    break
            return result if likes is None else _laid_out(result, likes)
        if not isinstance(out, tuple):
            return out.copy_(result)
        return tuple(r if o is None else o.copy_(r) for o, r in zip(out, result, strict=True))

    return run


def _layouts_of_kernels(op: DeclaredOp, args: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    """Tensors with the strides of a kernel's results, where arguments have gaps in their rows:
    PyTorch's ops return other strides then, and the fake kernel has promised these."""
    if not any(isinstance(a, Tensor) and has_gaps(a) for a in args):
        return None
    return op.allocate(*with_dense_rows(a.to("meta") if isinstance(a, Tensor) else a for a in args))


def _laid_out(result: Any, likes: tuple[Tensor, ...]) -> Any:
    if isinstance(result, tuple):
        return tuple(_laid_out(r, (like,)) for r, like in zip(result, likes, strict=True))
    if result.stride() == likes[0].stride():
        return result
    return torch.empty_like(likes[0], device=result.device, dtype=result.dtype).copy_(result)


def changed(op: DeclaredOp, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The arguments that an in-place call overwrites."""
    tensors = tuple(args[op.arguments.index(n)] for n in op.inplace)
    begins = [t.data_ptr() for t in tensors if t.numel()]
    if len(set(begins)) < len(begins):
        names = " and ".join(op.inplace)
        raise ValueError(f"{op.name}: {names} begin at the same address; inplace=True needs two")
    return tensors


class LaunchPlan:
    """A signature whose kernel is built. A call runs `follow`, which is generated for this plan
    because a loop over addresses takes as long as the launch."""

    def __init__(
        self,
        op: DeclaredOp,
        args: tuple[Any, ...],
        out: tuple[Tensor | None, ...] | None,
        how: How,
        alignment: int,
    ) -> None:
        self.op, self.how = op, how
        # kernels read rows along the last dimension; tensors of other strides are copied first
        self.copied = [i for i, a in enumerate(args) if isinstance(a, Tensor) and has_gaps(a)]
        if how.inplace and self.copied:
            name = op.arguments[self.copied[0]]
            raise ValueError(
                f"{op.name}: inplace=True needs {name} to have stride 1 in its last dimension"
            )
        args = self._dense(args)
        outs = self._outputs(args, out)
        if all(o is None or o.numel() == 0 for o in outs):
            self.follow: Plan = self._nothing
            return
        self._names = (*op.arguments, *op.outputs)
        self._realigned: dict[int, Plan] = {}
        values = dict(zip(self._names, (*args, *outs), strict=True))
        device = next(a.device for a in args if isinstance(a, Tensor))
        target = Target.of(device)
        call = Call(values, op=op.name, exact=how.exact, target=target, alignment=alignment)
        launch = _launch(op, how.backend, call)
        # the names of the present tensors that the kernel takes, in its order
        self.pointers = [n for n in launch.pointers if n and values[n] is not None]
        self.launch = on_device(device, backends.load(launch, values, device, op.name))
        # Triton's interpreter takes the tensors themselves, of any alignment
        self.mask = launch.alignment - 1 if device.type == "cuda" else None
        self.follow = self.follow_any if self.copied else compile_follow(self)
        if op.writes:
            self.follow = self._counting(self.follow)

    def _counting(self, follow: Plan) -> Plan:
        """`follow`, and the version counters of what it writes to, as PyTorch's own ops have it."""
        places = [self.op.arguments.index(n) for n in self.op.writes]
        if not set(places).isdisjoint(self.copied):
            raise Unsupported("a tensor to write to has gaps between the elements of its rows")

        def counted(args: tuple[Any, ...], out: Any) -> Any:
            result = follow(args, out)
            increment_version([args[i] for i in places])
            return result

        return counted

    def follow_any(self, args: tuple[Any, ...], out: Any) -> Any:
        """Follow the plan where arguments are copied first, or where some outputs are given."""
        args, outs = self._prepared(args, out)
        values = dict(zip(self._names, args + outs, strict=True))
        given = [values[n] for n in self.pointers]
        if self.mask is not None:
            given = list(map(Tensor.data_ptr, given))
            bits = functools.reduce(or_, given)
            if bits & self.mask:
                return self.realigned(bits, args, outs)
        self.launch(given)
        return outs[0] if len(outs) == 1 else outs

    def realigned(self, bits: int, args: tuple[Any, ...], outs: tuple[Tensor, ...]) -> Any:
        """Follow a plan for addresses that are aligned to the lowest set bit of `bits` only."""
        alignment = bits & -bits
        plan = self._realigned.get(alignment)
        if plan is None:
            plan = self.op.launch_plan(args, outs, self.how, alignment)
            self._realigned[alignment] = plan
        return plan(args, outs if len(outs) > 1 else outs[0])

    def _nothing(self, args: tuple[Any, ...], out: Any) -> Any:
        _, outs = self._prepared(args, out)
        return outs[0] if len(outs) == 1 else outs

    def _prepared(self, args: tuple[Any, ...], out: Any) -> tuple[tuple[Any, ...], Any]:
        args = self._dense(args)
        return args, self._outputs(args, out if out is None or type(out) is tuple else (out,))

    def _dense(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.copied:
            return args
        return tuple(a.contiguous() if i in self.copied else a for i, a in enumerate(args))

    def _outputs(self, args: tuple[Any, ...], out: Any) -> tuple[Tensor, ...]:
        if self.how.inplace:
            return changed(self.op, args)
        if out is None:
            return self.op.allocate(*args)
        if all(o is not None for o in out):
            return out
        fresh = self.op.allocate(*args)
        return tuple(f if o is None else o for o, f in zip(out, fresh, strict=True))


def on_device(device: torch.device, launch: Callable[[Any], None]) -> Callable[[Any], None]:
    """A launch on this GPU, which need not be the current one if there are several."""
    if device.type != "cuda" or torch.cuda.device_count() <= 1:
        return launch

    def launch_there(addresses: Any) -> None:
        if torch.cuda.current_device() == device.index:
            launch(addresses)
        else:
            with torch.cuda.device(device):
                launch(addresses)

    return launch_there


def _launch(op: DeclaredOp, backend: str, call: Call) -> Launch:
    """The planned launch; "aot" launches the kernel that "cuda" would compile."""
    if backend != "aot":
        return getattr(op.kernels, backend)(call)
    from ..backends import aot

    cuda: Any = op.kernels.cuda(call)
    return aot.compiled(cuda)

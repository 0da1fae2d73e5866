"""Writing down the ATen ops that run as a graph, with the tensors they run on.

For plain tensors and one layout of them this is what make_fx does, in a fifth of its time, and
nothing of PyTorch is patched for other threads meanwhile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..backends.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    decomposes,
    fake_like,
    pytree,
    refusing_compiled_functions,
    without_fakes,
)
from .watched_forward import CannotRecord

aten: Any = torch.ops.aten
READS_ON_HOST = "a value that is read on the host"
PLAIN = frozenset((Tensor, nn.Parameter, nn.Buffer, FakeTensor))
ASSERTS = (aten._assert_async, aten._functional_assert_async)
# numbers that a forward may read back from tensors that it has made of numbers
FEW = 250


@dataclass
class Traced:
    """A graph with the tensors as inputs, and what it reads beside them, by node."""

    graph: fx.Graph
    constants: dict[str, Tensor]


def trace(
    run: Callable[..., Sequence[Any]],
    tensors: Sequence[Tensor],
    before: Callable[[Any], None] = lambda op: None,
    *,
    real: bool = True,
) -> Traced:
    """Call `run` with these tensors, and write down its ops; unless `real` nothing is computed.
    `before` is called with each op before it runs. Every node says in `meta["val"]` what its result
    is like: fake tensors, which have no memory."""
    # a tensor that is no input is a constant
    fake = FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=True)
    writer = _Writer(fake, before)
    computing = nullcontext() if real else fake
    given = list(tensors) if real else [fake.from_tensor(t, static_shapes=True) for t in tensors]
    for number, tensor in enumerate(given):
        writer.take(tensor, f"arg{number}_1")
    with refusing_compiled_functions(), computing, writer:
        results = run(*given)
    if writer.refused is not None:
        raise CannotRecord(writer.refused)
    writer.graph.output(writer.written(list(results)))
    return Traced(writer.graph, writer.constants)


class _Writer(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, fake: Any, before: Callable[[Any], None]) -> None:
        super().__init__()
        self.graph, self.constants = fx.Graph(), dict[str, Tensor]()
        self._fake, self._before = fake, before
        self._nodes: Any = WeakTensorKeyDictionary()
        self._known: Any = WeakTensorKeyDictionary()  # values of tensors made of numbers
        self._alike: dict[Any, Tensor] = {}
        self.refused: str | None = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Under any other mode Dynamo skips what it is to compile, and goes on doing so."""
        return True

    def take(self, tensor: Tensor, name: str) -> None:
        """Make a tensor an input of the graph."""
        self._note(tensor, self.graph.placeholder(name))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not PLAIN.issuperset(types):
            return NotImplemented
        if isinstance(op, HigherOrderOperator):
            # an error inside of what Dynamo runs would leave it in a state that later calls fail in
            self.refused = f"an op that calls Python functions ({op})"
            return op(*args, **kwargs)
        if op.namespace == "prim":  # of what a tensor is, which is the same at every call
            return op(*args, **kwargs)
        self._before(op)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if decomposes(op, given):
            with self:
                parts = op.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if op is aten.is_nonzero.default:
            with self:
                return bool((args[0] != 0).item())
        known = [self._known.get(t) for t in given]
        numbers = bool(known) and all(value is not None for value in known)
        if torch.Tag.data_dependent_output in op.tags:
            if not numbers:
                raise CannotRecord(f"{READS_ON_HOST} ({op})")
            return self._of_numbers(op, args, kwargs)
        if op is aten.lift_fresh.default:  # what is written to it must not be in the constant
            op = aten.lift_fresh_copy.default
        if op.overloadpacket in ASSERTS:
            raise CannotRecord("it asserts something of values")
        if op._schema.is_mutable and self._writes_to_constant(op, args, kwargs):
            raise CannotRecord(f"it writes to a tensor that it holds ({op})")
        name = op.overloadpacket.__name__
        written = self.written(args), self.written(kwargs)
        result = op(*args, **kwargs)
        node = self.graph.create_node("call_function", op, *written, name=name)
        self._note(result, node)
        if op is aten.lift_fresh_copy.default:
            with without_fakes():
                self._know(result, args[0].clone())
        elif numbers and torch.Tag.nondeterministic_seeded not in op.tags:
            self._know(result, self._of_numbers(op, args, kwargs))
        return result

    def _writes_to_constant(self, op: Any, args: Any, kwargs: Any) -> bool:
        named = dict(zip([a.name for a in op._schema.arguments], args, strict=False)) | kwargs
        written = [named.get(a.name) for a in op._schema.arguments if a.is_write]
        nodes = [self._nodes.get(x) for x in written if isinstance(x, Tensor)]
        return any(node is None or node.op == "get_attr" for node in nodes)

    def _know(self, result: Any, value: Any) -> None:
        for made, known in zip(pytree.tree_leaves(result), pytree.tree_leaves(value), strict=True):
            if isinstance(made, Tensor) and made.numel() <= FEW:
                self._known[made] = known

    def _of_numbers(self, op: Any, args: Any, kwargs: Any) -> Any:
        given = pytree.tree_map(
            lambda x: self._known[x] if isinstance(x, Tensor) else x, (args, kwargs)
        )
        with without_fakes():
            return op(*given[0], **given[1])

    def written(self, value: Any) -> Any:
        """Arguments or results as nodes."""
        if isinstance(value, Tensor):
            node = self._nodes.get(value)
            return self._constant(value) if node is None else node
        if isinstance(value, tuple | list):
            return type(value)([self.written(v) for v in value])
        if isinstance(value, dict):
            return {name: self.written(v) for name, v in value.items()}
        return value

    def _constant(self, tensor: Tensor) -> fx.Node:
        node = self.graph.create_node("get_attr", f"_tensor_constant{len(self.constants)}")
        self.constants[node.name] = tensor
        self._note(tensor, node)
        return node

    def _note(self, result: Any, node: fx.Node) -> None:
        """Take a node for what makes these tensors."""
        node.meta["val"] = self._like(result)
        if isinstance(result, Tensor):
            self._nodes[result] = node
        elif isinstance(result, tuple | list):
            for number, part in enumerate(result):
                self._note(part, self.graph.call_function(operator.getitem, (node, number)))

    def _like(self, value: Any) -> Any:
        """A tensor of the same layout without memory."""
        if isinstance(value, tuple | list):
            return type(value)([self._like(v) for v in value])
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if value.layout is not torch.strided:
            raise CannotRecord(f"a tensor of layout {value.layout}")
        key = value.shape, value.stride(), value.dtype, value.device
        if key not in self._alike:
            self._alike[key] = fake_like(self._fake, value)
        return self._alike[key]

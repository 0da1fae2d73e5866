"""Writing down a module's forward together with its backward, as autograd runs it.

The graph has the parameters, the inputs and the gradients of the results as inputs. Its outputs are
the results and the *contributions* to the gradients: a tensor that is read in three places has
three, and autograd adds them one by one, in the order in which its nodes run, to what other modules
contribute. So they are kept apart, in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge

from ..backends.torch_internals import functional, pytree
from ..ops import library
from .recording import COLLECTIVES, CannotRecord, weights_of
from .tracing import Traced, trace
from .views import aten, packet
from .watched_forward import WatchedForward

# attention draws random numbers for dropout, of which there is none where its probability is zero
ATTENTIONS = frozenset(
    getattr(aten, f"_scaled_dot_product_{name}{backward}")
    for name in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
    )
    for backward in ("", "_backward")
)


@dataclass
class Joint:
    """Forward and backward of a module for one signature of its inputs."""

    graph: fx.Graph
    weights: tuple[str, ...]  # names of the parameters and buffers that come first
    returns: Returned
    results: int  # how many results there are: the first outputs of the graph
    # results that are an input as it was given, by number, and the number of that input
    handed_on: dict[int, int]
    used: tuple[int, ...]  # results whose gradients are the last inputs
    contributions: tuple[int, ...]  # the number of the input that each is for
    constants: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Call:
    """How a module was called, without its tensors: its forward can be called again with others."""

    leaves: list[Any]
    structure: Any
    positions: list[int]  # of the tensors among the leaves
    names: list[str]  # of the weights
    wanted: list[bool]  # of each weight and tensor, whether a gradient is

    @staticmethod
    def of(module: nn.Module, args: Any, kwargs: Any) -> tuple[Call, list[Tensor]]:
        """The call, and its tensors: weights first."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        weights = weights_of(module)
        tensors = [*weights.values(), *(leaves[i] for i in positions)]
        for i in positions:
            leaves[i] = None
        wanted = [t.requires_grad for t in tensors]
        return Call(leaves, structure, positions, list(weights), wanted), tensors

    def forward(
        self, module: nn.Module, tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Returned]:
        """The results for these tensors, and what the forward returns of them."""
        count = len(self.names)
        names = [f"module.{name}" for name in self.names]
        named = dict(zip(names, tensors[:count], strict=True))
        given = list(self.leaves)
        for place, tensor in zip(self.positions, tensors[count:], strict=True):
            given[place] = tensor
        a, k = pytree.tree_unflatten(given, self.structure)
        result = torch.func.functional_call(WatchedForward(module), named, a, k)
        outputs, structure = pytree.tree_flatten(result)
        return [o for o in outputs if isinstance(o, Tensor)], Returned.of(outputs, structure)


@dataclass
class Returned:
    """What a forward returns, without its tensors."""

    leaves: list[Any]
    structure: Any
    positions: list[int]  # of the tensors among the leaves

    @staticmethod
    def of(leaves: Sequence[Any], structure: Any) -> Returned:
        positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        others = [None if isinstance(x, Tensor) else x for x in leaves]
        return Returned(others, structure, positions)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.positions, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.structure)


@dataclass
class Differentiated:
    """Results of a forward with what autograd hands to its leaves, in the order of that."""

    outputs: list[Tensor]
    returns: Returned
    handed_on: dict[int, int]
    contributions: list[tuple[int, Tensor]]


# gradients of results, of which some have none: (results) -> one or None for each
Gradients = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]


def differentiate(
    module: nn.Module, call: Call, tensors: Sequence[Tensor], gradients: Gradients
) -> Differentiated:
    """Run a forward and its backward, as autograd does it."""
    with torch.enable_grad():
        leaves = [
            t.detach().requires_grad_() if wanted else t
            for t, wanted in zip(tensors, call.wanted, strict=True)
        ]
        outputs, returns = call.forward(module, leaves)
        numbers = {id(t): i for i, t in enumerate(leaves)}
        handed_on = {i: numbers[id(o)] for i, o in enumerate(outputs) if id(o) in numbers}
        pairs = [(o, g) for o, g in zip(outputs, gradients(outputs), strict=True) if g is not None]
        wanted = [i for i, w in enumerate(call.wanted) if w]
        found: list[tuple[int, Tensor]] = []
        own = {get_gradient_edge(leaves[i]).node: i for i in wanted}
        _listen([o.grad_fn for o, _ in pairs], own, found)
        # on this thread, which may be tracing
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(
                [o for o, _ in pairs],
                [leaves[i] for i in wanted],
                [g for _, g in pairs],
                allow_unused=True,
            )
    return Differentiated([o.detach() for o in outputs], returns, handed_on, found)


def rehearse_forward(module: nn.Module, call: Call, tensors: Sequence[Tensor]) -> None:
    """Raise CannotRecord if a forward cannot be recorded. Nothing is computed: it may draw random
    numbers, and none must be drawn that would not be without us."""

    def run(*given: Tensor) -> list[Tensor]:
        return call.forward(module, given)[0]

    _check(_traced(run, tensors, real=False).graph)


def record_joint(
    module: nn.Module, call: Call, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Joint:
    """Run forward and backward once, with these gradients of the results, and write down what they
    do."""
    used = [i for i, g in enumerate(gradients) if g is not None]
    count, made = len(tensors), list[Differentiated]()

    def run(*given: Tensor) -> list[Tensor]:
        late = dict(zip(used, given[count:], strict=True))
        found = differentiate(
            module, call, given[:count], lambda results: [late.get(i) for i in range(len(results))]
        )
        made[:] = [found]
        return [*found.outputs, *(t for _, t in found.contributions)]

    traced = _traced(run, [*tensors, *(g for g in gradients if g is not None)])
    _check(traced.graph)
    if any(t.requires_grad for t in traced.constants.values()):
        raise CannotRecord("a weight that is not read from its own module")
    (found,) = made
    return Joint(
        traced.graph,
        tuple(call.names),
        found.returns,
        len(found.outputs),
        found.handed_on,
        tuple(used),
        tuple(number for number, _ in found.contributions),
        traced.constants,
    )


def _traced(
    run: Callable[..., list[Tensor]], tensors: Sequence[Tensor], *, real: bool = True
) -> Traced:
    with torch.no_grad():
        try:
            traced = trace(functional(run), tensors, real=real)
        except (CannotRecord, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CannotRecord(str(error).strip().partition("\n")[0]) from error
    traced.graph.eliminate_dead_code()
    return traced


def _listen(roots: Sequence[Any], leaves: dict[Any, int], found: list[tuple[int, Tensor]]) -> None:
    """Note what the nodes of autograd hand to these leaves, when they run."""
    pending, seen = list(roots), set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        after = [following for following, _ in node.next_functions]
        pending += after
        to = [(i, leaves[n]) for i, n in enumerate(after) if n in leaves]
        if to:

            def note(gradients: Any, _: Any, to: list[tuple[int, int]] = to) -> None:
                found.extend((leaf, gradients[i]) for i, leaf in to if gradients[i] is not None)

            node.register_hook(note)


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if why := _why_not(node):
            raise CannotRecord(why)


def _why_not(node: fx.Node) -> str | None:
    """Why a graph with this node cannot be used again, or None."""
    kind, tags = packet(node), getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags and not _without_dropout(node):
        return f"random numbers ({node.target})"
    if getattr(node.target, "namespace", "").endswith(COLLECTIVES):
        return f"it exchanges tensors with other processes ({node.target})"
    if torch.Tag.dynamic_output_shape in tags and not _by_numbers(node):
        return f"a shape that depends on values ({node.target})"
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return f"it writes to a tensor ({kind})"
    if library.is_another_object(node.target):
        return f"torch.ops was cleared ({node.target})"
    return None


def _by_numbers(node: fx.Node) -> bool:
    """Whether a node takes elements by their positions, not by truth values."""
    if packet(node) is not aten.index:
        return False
    return all(i is None or i.meta["val"].dtype != torch.bool for i in node.args[1])


def _without_dropout(node: fx.Node) -> bool:
    if packet(node) not in ATTENTIONS:
        return False
    names = [a.name for a in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return not given.get("dropout_p", 0.0)

"""CUDA graphs of blocks while gradients are recorded: when a graph may be used, and which.

A block that runs as programs, and whose backward has run once, is captured at its next call; later
calls with the same layout, weights at the same addresses and an unchanged block are replayed. A
call whose replay would overwrite what a backward still needs runs its programs without a graph, and
so does every call for which a replay could be wrong. The reasons are counted.

A block has one graph at a time, since the graph keeps the block's activations in memory. Inputs of
another layout get it once the old one has not been used for PATIENCE calls.

Where autograd saves through hooks, a block has another graph, which shares its memory with those of
all blocks: see block_graph. With gradient checkpointing around each block it is lent to one block
after the other; a checkpoint around several needs the values of all of them at once, and only the
first that runs has a graph.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from ...backends.torch_internals import any_autocast, in_backward, saves_through_hooks
from ...backends.user_warnings import warn
from ..graphs.buffers import InputBuffer, Refusal, alignment
from ..graphs.capture import capturing
from ..graphs.host_reads import reading
from ..graphs.recorder import Recorder, capture_lock
from ..runtime import model_run
from .block_graph import Block, BlockGraph, Graphed, Loan, SharedBuffer, Use, layouts_of
from .random_numbers import Numbers

# calls of a block with another layout, after which its graph gives way to one for that
PATIENCE = 8
# captures of a block for one layout: what makes its graph invalid so often will go on doing so
MAX_CAPTURES = 4

WAITS = "its last forward still waits for its backward"
SHARED = "an input that another forward's backward still needs"
ORDER = "its blocks ran in another order before"
MOVED = "its weights were moved"
ALIGNMENT = "an input that begins at another alignment"
ANOTHER = "inputs of another layout have its graph"
LENT = "the values of another block are still needed (hooks around what autograd saves)"
RECOMPUTED = "it runs inside a backward (reentrant checkpointing)"
DISTRIBUTED = "torch.distributed is in use (DDP, FSDP)"
CAPTURED = "inside another capture"


class TrainingGraphs:
    """The graphs of the blocks of one model. `recorder` makes what captures and replays."""

    def __init__(self, recorder: type[Recorder], name: str = "") -> None:
        self.name = name
        self.reasons: Counter[str] = Counter()
        self.asked = False  # whether the model has run while gradients were recorded
        self.replays = 0
        # of forwards and of backwards: see block_graph
        self.recorders = _pair(recorder)
        self._lock = threading.RLock()
        self._orders = count(1)
        self._owners: WeakKeyDictionary[nn.Module, Graphed] = WeakKeyDictionary()
        self._uses: WeakSet[Use] = WeakSet()
        self._buffers: WeakSet[SharedBuffer] = WeakSet()
        self._gradients: dict[Any, InputBuffer] = {}
        # of graphs that share their memory
        self.on_loan = _pair(recorder)
        self._borrowers: WeakKeyDictionary[nn.Module, Graphed] = WeakKeyDictionary()
        self._inputs_on_loan: WeakValueDictionary[Any, SharedBuffer] = WeakValueDictionary()
        self._loan: Loan | None = None

    @property
    def captured(self) -> int:
        """How many blocks have a graph of their forward and one of their backward."""
        return len({*self._owners} | {*self._borrowers})

    def describe(self) -> str:
        """A line for a report; empty if gradients were never recorded."""
        if not self.asked and not self.reasons and not self.captured:
            return ""
        blocks = f"{self.captured} block{'s' * (self.captured != 1)}"
        line = f"{self.name}: " * bool(self.name) + "while gradients are recorded: "
        line += f"graphs of forward and backward for {blocks}"
        if self.reasons:
            why = ", ".join(f"{r} ({n})" for r, n in self.reasons.most_common())
            return f"{line}; calls of blocks that ran without one: {why}"
        return line if self.captured or self.replays else f"{line}: none has run twice as programs"

    def refuse(self, reason: str) -> None:
        """Count a call of a block that ran without a graph."""
        self.reasons[reason] += 1

    def forget(self, module: nn.Module) -> None:
        """Drop the graph of a block: the block has changed."""
        with self._lock:
            for graphs in (self._owners, self._borrowers):
                if (found := graphs.pop(module, None)) is not None:
                    found.graph = None

    def forward(
        self, block: Block, inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], Use | list[Tensor]] | None:
        """Results from a graph, and what stands for the values that its backward needs, or these
        values in memory that is lent; None if the call has to run without a graph."""
        try:
            _check_surroundings(self.recorders[0], inputs[block.weights :])
            with self._lock:
                if saves_through_hooks():
                    return self._forward_on_loan(block, inputs)
                if in_backward():
                    raise Refusal(RECOMPUTED)
                return self._forward(block, inputs)
        except Refusal as reason:
            self.refuse(str(reason))
            return None

    def backward(
        self, graph: BlockGraph, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor] | None:
        """The contributions of the last forward of a graph, from its second graph; None if the
        backward has to run without one."""
        given = [g for g in gradients if g is not None]
        why = graph.why_not_backward(weights, given)
        if capturing() or self.recorders[1].busy():
            why = CAPTURED
        elif any_autocast():
            why = "autocast around the backward"
        if why is not None:
            self.refuse(why)
            return None
        with self._lock:
            return graph.backward(given)

    def _forward_on_loan(
        self, block: Block, inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]] | None:
        if self._loan is not None and not self._loan.is_over():
            raise Refusal(LENT)
        weights, given = inputs[: block.weights], inputs[block.weights :]
        found, module, token = block.on_loan, block.module(), model_run.active.token
        if found.refused is not None:
            raise Refusal(found.refused)
        if found.graph is None:
            if not block.graphed.backward_ran or in_backward() or module is None:
                return None
            _take_turn(self._borrowers, module, found)
            found.graph = self._made(found, block, inputs, token, self._capture_on_loan)
            self._borrowers[module] = found
        elif not found.graph.reads(weights):
            found.graph = None
            if found.captures >= MAX_CAPTURES:
                found.refused = f"{MOVED}, at every capture"
            raise Refusal(MOVED)
        elif not found.graph.fits(given):
            raise Refusal(ALIGNMENT)
        found.unused = 0
        self.replays += 1
        results, self._loan = found.graph.forward_on_loan(given, token)
        return results, self._loan.take()

    def _capture_on_loan(self, block: Block, inputs: Sequence[Tensor], token: int) -> BlockGraph:
        given = _capturable(block, inputs)
        block.on_loan.captures += 1
        with capture_lock, self.on_loan[0].exclusive(given[0].device):
            buffers = [self._buffer_on_loan(i, t, token) for i, t in enumerate(given)]
            gradients = self._random_gradients(block)
            graph = BlockGraph(block, inputs, buffers, gradients, self.on_loan, 0)
            graph.lend()
            return graph

    def _buffer_on_loan(self, number: int, given: Tensor, token: int) -> SharedBuffer:
        """Memory for an input, which the graphs of all blocks share."""
        key = number, *layouts_of([given]), alignment(given)
        found = self._inputs_on_loan.get(key)
        if found is None:
            found = self._inputs_on_loan[key] = SharedBuffer(given)
        found.fill(given, token)
        return found

    def _forward(self, block: Block, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Use] | None:
        weights, given = inputs[: block.weights], inputs[block.weights :]
        token = model_run.active.token
        graph = block.graphed.graph
        if graph is None:
            if not block.graphed.backward_ran:
                return None
            graph = self._captured(block, inputs, token)
        elif graph.pending():
            raise Refusal(WAITS)
        elif not graph.reads(weights):
            self._drop(block, MOVED)
        elif not graph.fits(given):
            raise Refusal(ALIGNMENT)
        elif self._is_out_of_order(graph, token):
            self._let_go(block, ORDER)
            graph = self._captured(block, inputs, token)
        else:
            self._check_memory(block, graph, given, token)
        block.graphed.unused = 0
        self.replays += 1
        results, use = graph.forward(given, token)
        self._uses.add(use)
        return results, use

    def _is_out_of_order(self, graph: BlockGraph, token: int) -> bool:
        """Whether blocks have run before this one in this forward that were captured after it: its
        graph may write to what their backwards need. So it is when a block that comes first has its
        graph a step later, because its first gradients lay otherwise than expected."""
        later = [use for use in self._uses if not use.done and use.order > graph.order]
        if any(use.token != token for use in later):
            raise Refusal(WAITS)
        return bool(later)

    def _check_memory(
        self, block: Block, graph: BlockGraph, given: Sequence[Tensor], token: int
    ) -> None:
        """Refuse a replay that would write to inputs that a backward still needs. Where another
        forward of the model needs them, the graph is used again later; where this one does, it
        never fits."""
        for buffer, tensor in zip(graph.buffers, given, strict=True):
            if buffer.holds(tensor, token):
                continue
            needed = buffer.needed()
            if any(use.token != token for use in needed):
                raise Refusal(SHARED)
            if needed:
                self._drop(block, SHARED)

    def _drop(self, block: Block, why: str) -> NoReturn:
        """Drop a graph that is no longer valid; the next call is captured again."""
        self._let_go(block, why)
        raise Refusal(why)

    def _let_go(self, block: Block, why: str) -> None:
        found = block.graphed
        found.graph = None
        if (module := block.module()) is not None:
            self._owners.pop(module, None)
        if found.captures >= MAX_CAPTURES:
            found.refused = f"{why}, at every capture"

    def _captured(self, block: Block, inputs: Sequence[Tensor], token: int) -> BlockGraph:
        found, module = block.graphed, block.module()
        if found.refused is not None:
            raise Refusal(found.refused)
        if module is not None:
            _take_turn(self._owners, module, found)
        graph = found.graph = self._made(found, block, inputs, token, self._capture)
        if module is not None:
            self._owners[module] = found
        return graph

    def _made(
        self,
        found: Graphed,
        block: Block,
        inputs: Sequence[Tensor],
        token: int,
        capture: Callable[[Block, Sequence[Tensor], int], BlockGraph],
    ) -> BlockGraph:
        """A new graph; if there is none, why there never is one."""
        try:
            return capture(block, inputs, token)
        except Refusal as no:
            found.refused = str(no)
        except torch.OutOfMemoryError:
            found.refused = "not enough memory for its graphs"
        except Exception as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            found.refused = f"capture failed: {line}"
            warn(f"a block runs without CUDA graphs while training: {found.refused}")
        raise Refusal(found.refused)

    def _capture(self, block: Block, inputs: Sequence[Tensor], token: int) -> BlockGraph:
        given = _capturable(block, inputs)
        block.graphed.captures += 1
        with capture_lock, self.recorders[0].exclusive(given[0].device):
            buffers = [self._buffer(t, token) for t in given]
            gradients = self._random_gradients(block)
            order = next(self._orders)
            return BlockGraph(block, inputs, buffers, gradients, self.recorders, order)

    def _buffer(self, given: Tensor, token: int) -> SharedBuffer:
        """A buffer that holds an input: one of another block that has it already, or a new one."""
        found = next((b for b in self._buffers if b.holds(given, token)), None)
        if found is None:
            found = SharedBuffer(given)
            found.fill(given, token)
            self._buffers.add(found)
        return found

    def _random_gradients(self, block: Block) -> list[InputBuffer | None]:
        """Memory for the gradients of a block's results, which blocks of one layout share: it is
        filled just before a backward is replayed."""
        draw, found = Numbers(), list[InputBuffer | None]()
        for number, layout in enumerate(block.layouts):
            random = draw.gradient(layout)
            if random is None:
                found.append(None)
                continue
            key = number, layout
            if key not in self._gradients:
                self._gradients[key] = InputBuffer(random)
            self._gradients[key].fill(random)
            found.append(self._gradients[key])
        return found


def _pair(recorder: type[Recorder]) -> tuple[Recorder, Recorder]:
    """Two recorders whose graphs wait for each other, as `BlockGraph.exclusive` has them do."""
    first = recorder()
    return first, recorder(first)


def _take_turn(
    owners: WeakKeyDictionary[nn.Module, Graphed], module: nn.Module, found: Graphed
) -> None:
    """Refuse a block a second graph, unless the one for inputs of another layout has not been used
    for long: that is dropped."""
    owner = owners.get(module)
    if owner is None or owner is found:
        return
    owner.unused += 1
    if owner.unused < PATIENCE:
        raise Refusal(ANOTHER)
    owner.graph, owner.captures = None, 0


def _capturable(block: Block, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inputs that are no weights, if a graph can read all of them."""
    given, devices = inputs[block.weights :], {t.device for t in inputs}
    if not given:
        raise Refusal("no tensor among the inputs")
    if len(devices) != 1:
        raise Refusal(f"weights and inputs on {' and '.join(sorted(map(str, devices)))}")
    return given


def _check_surroundings(recorder: Recorder, given: Sequence[Tensor]) -> None:
    """Refuse where a replay cannot keep what a backward needs, or cannot run at all."""
    if elsewhere := {t.device.type for t in given} - {recorder.device_type}:
        raise Refusal(f"inputs on {' and '.join(sorted(elsewhere))}")
    if capturing() or reading() or recorder.busy():
        raise Refusal(CAPTURED)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise Refusal(DISTRIBUTED)

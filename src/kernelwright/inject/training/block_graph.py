"""Forward and backward of one block as two graphs, and the memory that they share.

The forward leaves what the backward needs in memory of its graph, so it must not run again before
that has been read: a `Use` stands for one forward whose backward may still come. Weights are read
where they lie; inputs are copied in, results and gradients are copied out.

Forwards are captured in one memory pool and backwards in another. A backward leaves nothing in its
pool. A forward may write to memory that a forward captured *later* keeps values in: what was freed
after one capture is used by the next. `order` numbers the captures, for whoever replays them.

Where autograd saves through hooks, such as those of gradient checkpointing, keeping the values of
every block would waste what the hooks save. There all blocks keep their values in the same memory:
it is lent to one forward at a time (`Loan`), until no tensor of that forward is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...backends.torch_internals import (
    convolution_switches,
    float32_switches,
    gemm_switches,
    unowned_storage,
)
from ..graphs.buffers import InputBuffer, Refusal, Results, alignment
from ..graphs.capture import keeping, recording
from ..graphs.recorder import Recorder
from ..runtime.sites import equal

Lendable = tuple[int, int, torch.device, list[tuple[torch.dtype, int, torch.Size, Any]]]
OTHER_BITS = "its graph gives other bits than its programs"


# class, shape, strides, dtype and device of the gradient of each result, None where it has none
Layouts = tuple[Any, ...]


def layouts_of(gradients: Sequence[Tensor | None]) -> Layouts:
    return tuple(
        None if g is None else (type(g), g.shape, g.stride(), g.dtype, g.device) for g in gradients
    )


class Use:
    """What a forward has left in the memory of its graph, until its backward is done or the node of
    autograd that holds this is gone."""

    __slots__ = ("__weakref__", "done", "graph", "order", "token")

    def __init__(self, graph: BlockGraph, token: int) -> None:
        self.graph, self.order, self.token = graph, graph.order, token
        self.done = False


class Loan:
    """Values that a forward has left in memory which other forwards use too, as tensors that do
    not own it. It ends when none of them, and no view of them, is alive."""

    def __init__(self, graph: BlockGraph) -> None:
        self._graph = graph  # as long as it lives its memory belongs to no one else
        begin, size, device, layouts = graph.lendable
        storage = unowned_storage(begin, device, size)
        self._alive = StorageWeakRef(storage)
        self._tensors = [
            torch.empty(0, dtype=dtype, device=device).set_(storage, *where)
            for dtype, *where in layouts
        ]

    def take(self) -> list[Tensor]:
        """The tensors, once: held here they would make the loan last for ever."""
        taken, self._tensors = self._tensors, []
        return taken

    def is_over(self) -> bool:
        return bool(self._alive.expired())


class SharedBuffer:
    """Memory for an input of graphs. Blocks that are given the same tensor in one forward of their
    model, such as rotary tables, share it."""

    def __init__(self, like: Tensor) -> None:
        self._buffer = InputBuffer(like)
        self._source: ref[Tensor] | None = None
        self._version = self._token = 0
        self.uses: WeakSet[Use] = WeakSet()

    @property
    def tensor(self) -> Tensor:
        return self._buffer.tensor

    def holds(self, given: Tensor, token: int) -> bool:
        """Whether it was filled with this tensor in the forward of the model that is running. Only
        then: between two forwards a tensor may be written to unnoticed."""
        return (
            token != 0
            and self._token == token
            and self._source is not None
            and self._source() is given
            and self._version == given._version
        )

    def needed(self) -> list[Use]:
        """The forwards whose backward may still read it."""
        return [use for use in self.uses if not use.done]

    def fill(self, given: Tensor, token: int) -> None:
        self._source = None
        self._buffer.fill(given)
        self._source, self._version, self._token = ref(given), given._version, token


@dataclass(eq=False)
class Graphed:
    """What is known about the graph of a block for inputs of one layout."""

    graph: BlockGraph | None = None
    backward_ran: bool = False  # with gradients of the expected layout
    captures: int = 0
    unused: int = 0  # calls of the block with another layout since the graph was used
    refused: str | None = None  # why there never is one


class Block(Protocol):
    """A block whose forward and backward are functions of tensors alone."""

    module: ref[nn.Module]
    graphed: Graphed
    on_loan: Graphed  # its graph for where autograd saves through hooks

    @property
    def weights(self) -> int:
        """How many of the inputs are weights: the first ones."""

    @property
    def layouts(self) -> Sequence[Any]:
        """Of the gradients of its results: class, shape, strides, dtype and device, or None."""

    @property
    def repeats(self) -> Sequence[bool]:
        """Of each contribution, whether it has the same bits every time."""

    def run_forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and what is kept for the backward."""

    def run_backward(
        self, inputs: Sequence[Tensor], kept: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The contributions to the gradients of the inputs."""


class BlockGraph:
    """Forward and backward of a block, captured for weights at their addresses and inputs of one
    layout."""

    def __init__(
        self,
        block: Block,
        inputs: Sequence[Tensor],
        buffers: Sequence[SharedBuffer],  # filled with those that are not weights
        gradients: Sequence[InputBuffer | None],  # filled with random numbers
        recorders: tuple[Recorder, Recorder],
        order: int,
    ) -> None:
        """Captures both, and compares them with running them. Refused if they differ."""
        weights, given = inputs[: block.weights], inputs[block.weights :]
        self.order = order
        self.device = given[0].device
        self.buffers = buffers
        self._gradients = [b for b in gradients if b is not None]
        self._recorders = recorders
        self._stream = recorders[0].stream()
        self._addresses, self._alignments = addresses(weights), list(map(alignment, given))
        self._switches = _switches()
        self._use: Callable[[], Use | None] = lambda: None
        self.lendable: Lendable = (0, 0, self.device, [])
        static = self.inputs
        random = [None if b is None else b.tensor for b in gradients]

        def forward() -> tuple[list[Tensor], list[Tensor]]:
            with recording():
                return block.run_forward([*weights, *static])

        def backward() -> list[Tensor]:
            with recording():
                return block.run_backward([*weights, *static], kept, random)

        # outside of a capture first: whatever is loaded or chosen at the first call is there then
        results, needed = block.run_forward(inputs)
        contributions = block.run_backward(inputs, needed, random)
        del needed
        with keeping() as (self._alive, _):
            self._replay_forward, (made, kept) = recorders[0].record(forward, self.device)
        self.kept = kept
        self._results = Results(made, static, weights, owned=False)
        del made
        self._replay_forward()
        with keeping() as (self._alive_backward, _):
            self._replay_backward, found = recorders[1].record(backward, self.device)
        self._contributions = Results(found, [b.tensor for b in self._gradients], (), owned=False)
        del found
        if not equal(results, self._results.copies(given)):
            raise Refusal(OTHER_BITS)
        self._replay_backward()
        again = self._contributions.copies([t for t in random if t is not None])
        for ours, theirs, same in zip(again, contributions, block.repeats, strict=True):
            if same and not equal(ours, theirs):
                raise Refusal(OTHER_BITS)

    @property
    def inputs(self) -> list[Tensor]:
        """The memory that inputs are copied to."""
        return [buffer.tensor for buffer in self.buffers]

    def pending(self) -> bool:
        """Whether the backward of its last forward may still come."""
        use = self._use()
        return use is not None and not use.done

    def reads(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the weights at the addresses that it reads."""
        return addresses(weights) == self._addresses

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Whether inputs begin where a kernel would be chosen as at capture."""
        return list(map(alignment, given)) == self._alignments

    def forward(self, given: Sequence[Tensor], token: int) -> tuple[list[Tensor], Use]:
        """The results for inputs, of which those that buffers do not hold yet are copied in."""
        use = Use(self, token)
        with self.exclusive():
            for buffer in self.buffers:
                buffer.uses.add(use)
            self._use = ref(use)
            return self._results_for(given, token), use

    def forward_on_loan(self, given: Sequence[Tensor], token: int) -> tuple[list[Tensor], Loan]:
        """The same, with what the backward needs in memory that is lent."""
        with self.exclusive():
            return self._results_for(given, token), Loan(self)

    def _results_for(self, given: Sequence[Tensor], token: int) -> list[Tensor]:
        for buffer, tensor in zip(self.buffers, given, strict=True):
            if not buffer.holds(tensor, token):
                buffer.fill(tensor, token)
        self._replay_forward()
        return self._results.copies(given)

    def lend(self) -> None:
        """Give the memory of what is kept to graphs that are captured later, too: from now on a
        forward has to be called with `forward_on_loan`."""
        self.lendable, self.kept = _lendable(self.kept, self.device), []
        if not self.lendable[
            1
        ]:  # its inputs, which are shared as well, have nothing to tell a loan
            raise Refusal("its backward needs nothing but its inputs")

    def lent(self, kept: Sequence[Tensor]) -> bool:
        """Whether these are the values that a forward has left in memory which is lent."""
        begin, _, _, layouts = self.lendable
        return len(kept) == len(layouts) and all(
            t.data_ptr() == begin + offset * dtype.itemsize
            for t, (dtype, offset, *_) in zip(kept, layouts, strict=True)
            if t.numel()
        )

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The contributions of the last forward, for these gradients of its results."""
        with self.exclusive():
            for buffer, gradient in zip(self._gradients, gradients, strict=True):
                buffer.fill(gradient)
            self._replay_backward()
            return self._contributions.copies(gradients)

    def why_not_backward(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> str | None:
        """Why the captured backward does not compute what its programs would now, or None."""
        if not self.reads(weights):
            return "weights were moved between forward and backward"
        if self._switches != _switches():
            return "a switch of PyTorch was changed between forward and backward"
        at = [alignment(b.tensor) for b in self._gradients]
        if list(map(alignment, gradients)) != at:
            return "a gradient that begins at another alignment"
        return None

    def apart(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The same, copied where they lie in memory that the next forward writes to."""
        own = {t.untyped_storage().data_ptr() for t in (*self.kept, *self.inputs) if t.numel()}
        begin, size, *_ = self.lendable
        return [
            t.clone()
            if t is not None
            and ((at := t.untyped_storage().data_ptr()) in own or begin <= at < begin + size)
            else t
            for t in tensors
        ]

    def exclusive(self) -> Any:
        """A context for work on the memory of graphs."""
        stack = ExitStack()
        for recorder in self._recorders:
            stack.enter_context(recorder.exclusive(self.device))
        stream = self._recorders[0].stream()
        if stream != self._stream:
            for tensor in (*self.inputs, *(b.tensor for b in self._gradients)):
                tensor.record_stream(stream)
        return stack


def _lendable(kept: Sequence[Tensor], device: torch.device) -> Lendable:
    """Where tensors lie: the first address and the bytes of all of them, and of each its dtype, the
    elements before it, sizes and strides."""
    filled = [t.untyped_storage() for t in kept if t.numel()]
    begin = min((s.data_ptr() for s in filled), default=0)
    end = max((s.data_ptr() + s.nbytes() for s in filled), default=0)
    layouts = []
    for t in kept:
        before = t.data_ptr() - begin if t.numel() else 0
        if before % t.element_size():
            raise Refusal("values that begin at no multiple of their size")
        layouts.append((t.dtype, before // t.element_size(), t.shape, t.stride()))
    return begin, end - begin, device, layouts


def addresses(weights: Sequence[Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, weights))


def _switches() -> tuple[Any, ...]:
    """What decides, with its operands, which kernel a GEMM or a convolution runs."""
    return gemm_switches(), float32_switches(), convolution_switches()

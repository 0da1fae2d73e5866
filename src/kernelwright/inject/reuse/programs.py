"""Modules run as programs of the fuser, recorded once for each structure and layout of inputs.

A recording has weights as inputs, so it serves every module that does the same with its own. What a
forward reads from Python is part of the module's state: a verdict on a module holds for one state,
and what is bound here belongs to that verdict (`mode.cache_scope`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, fx, nn

from ...backends.torch_internals import any_autocast, attention_choice, layout_check
from ...fuser import planning, recording
from ...fuser.cached_attention import Attend, plainly
from ...fuser.eight_bit_rows import mark_rows
from ...fuser.expression import ROUNDED
from ...fuser.index import CannotIndex
from ...fuser.launching import Kernels
from ...fuser.program import Program
from ...fuser.recorded_ops import plain_attention, sdp_backends
from ...fuser.recording import CannotRecord, Recording
from ...fuser.rewriting import (
    copy_rows_of_products,
    join_products_of_one_input,
    merge_heads_where_they_lie,
    multiply_whole_rows,
    split_products_of_concatenations,
    take_activations_into_products,
    take_bias_out_of_convolutions,
    take_bias_out_of_products,
    take_gelu_into_products,
)
from ...fuser.running import Executable
from ...fuser.watched_forward import SETS
from ...ops.attention import attention, kernel_of
from ...ops.attention.sdpa import ADDING
from ..graphs.capture import given_state
from ..identify.structure import layout, structure_of
from ..runtime.cache_copies import CacheCopies, can_copy
from ..runtime.input_key import CONTAINERS, WRITES_TO_INPUT
from ..runtime.sites import Declined, declined, eagerly, mode
from ..state.switches import torch_attends
from .bound import Bound, Owners
from .cached_calls import own_calls
from .kept_prompts import KeptPrompt
from .masks import infinities_of, lengths_of, numbers_of
from .packed_gemm import SameBits
from .program_products import ProgramProducts, layers_of
from .program_sites import ProgramSites
from .prompt_values import PerForwardCache, Prompts
from .recordable import (
    little_to_gain,
    opaque_in,
    remembers,
    signature,
    unknown_constant,
    waits,
    why_not,
)
from .recorded import BlockLine, Recorded

OTHER_INDICES = "its modules have several indices in a cache where those of another block have one"
# recordings of one injection: a service that keeps getting new shapes must not grow without bound
MAX_RECORDINGS = 512


@dataclass(eq=False)
class Programs:
    """The recordings of one injection."""

    exact: bool = True
    fp8_layers: Any = None
    prompts: Prompts | None = None
    same_bits: SameBits | None = None
    # calls a layer's attention function with the keys and values of a cache
    attend: Attend = plainly
    # calls of blocks of a class, or of a program, that ran otherwise than compared, and why
    fell_back: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lengths: PerForwardCache = field(default_factory=PerForwardCache)  # that masks say
    _numbers: PerForwardCache = field(default_factory=PerForwardCache)  # that masks add
    _shared: dict[Any, Recorded | str] = field(default_factory=dict)
    _last: dict[str, Recorded] = field(default_factory=dict)  # by class
    # by the id of a block that has no recording at its last inputs: its class, and why. A report
    # says so after the block is gone, too
    _refused: dict[int, tuple[str, str]] = field(default_factory=dict)
    _bound: WeakKeyDictionary[nn.Module, dict[Any, Bound | str]] = field(
        default_factory=WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        self._products = ProgramProducts(self.exact, self.fp8_layers, self.same_bits)

    def described(self) -> list[BlockLine]:
        """What became of each class of blocks: as last recorded, and why some of them are not."""
        lines = [found.described() for found in self._last.values()]
        refused = dict.fromkeys(self._refused.values())
        return lines + [BlockLine(kind, 0, 0, {}, (why,)) for kind, why in refused]

    def recorded(self, module: nn.Module, args: Any, kwargs: Any) -> Recorded | str:
        """The forward of a module as programs, or why it cannot be."""
        return self._recorded(module, args, kwargs, ())[0]

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a forward, or NotImplemented if the module's own has to run."""
        if torch.is_grad_enabled():
            return self._declined("autograd records it")
        known = self._bound.get(module)
        if known is None:
            known = self._bound.setdefault(module, {})
        key = mode.cache_scope
        if mode.owner != id(module):  # the scope is that of a module around it
            key = key, (signature(args, kwargs),)
        found = known.get(key)
        if found is None:
            found, result = self._bind(module, key[1][0], args, kwargs)
            if len(known) >= MAX_RECORDINGS:
                known.clear()
            known[key] = found
            if result is not None:
                if mode.uninformative is not None:
                    mode.uninformative.add("forward as programs")  # to be compared next time
                return result
        if isinstance(found, str):
            return self._declined(found)
        result = found(module, args, kwargs)
        if isinstance(result, str):
            self.fell_back[found.recorded.kind, result] += 1
            return self._declined(result)
        return result

    @staticmethod
    def _declined(why: str) -> Any:
        if mode.aside:
            raise Declined(why)
        declined("forward as programs", why)
        return NotImplemented

    def _bind(
        self, module: nn.Module, signed: Any, args: Any, kwargs: Any
    ) -> tuple[Bound | str, Any]:
        """A recording for this module. Layers with hooks must not run twice, nor may attention that
        waits for other processes: if it has either, the run that was recorded is this call, and its
        result is returned as well, even if the recording is of no use."""
        if self.fp8_layers is not None:  # a recording runs the forward with all weights
            self.fp8_layers.fetch_all(module)
        opaque = opaque_in(module)
        once = bool(opaque) or waits(module)
        why = why_not(module, opaque)
        if why is None and not can_copy(module, args, kwargs):
            why = WRITES_TO_INPUT
        if why is None and any_autocast():
            why = "autocast"
        if why is not None:
            self._refused[id(module)] = type(module).__name__, why
            return why, None
        key = structure_of(module, opaque), signed, torch.is_inference_mode_enabled()
        result = None
        if (found := self._shared.get(key)) is None:
            found, result = self._recorded_aside(module, args, kwargs, opaque, once)
            private = isinstance(found, Recorded) and found.recording.constants
            if not private:
                if len(self._shared) >= MAX_RECORDINGS:
                    self._shared.clear()
                self._shared[key] = found
        if isinstance(found, str):
            self._refused[id(module)] = type(module).__name__, found
            if found.endswith(SETS):
                given_state(v for v in (*args, *kwargs.values()) if isinstance(v, CONTAINERS))
            return found, result if once else None
        self._last[type(module).__name__] = found
        calls = own_calls(module, found.recording)
        if calls is None:
            self._refused[id(module)] = type(module).__name__, OTHER_INDICES
            return OTHER_INDICES, None
        self._refused.pop(id(module), None)
        places = places_of(module, found.recording.weights)
        weights = [holder[name] for holder, name in places]
        layouts, check = list(map(layout, weights)), layout_check(weights)
        layers = layers_of(module, found.recording)
        names = found.recording.weights
        owners = [ref(module.get_submodule(name.rpartition(".")[0])) for name in names]
        bound = Bound(
            *(found, places, layouts, check, opaque, layers, owners, self._prompts, self.exact),
            caches=calls,
            attend=self.attend,
        )
        return bound, result if once else None

    def _prompts(
        self, found: Recorded, layers: Mapping[str, nn.Module], owners: Owners
    ) -> list[KeptPrompt]:
        """What to keep of prompts."""
        if self.prompts is None:
            return []
        kept = []
        for steps in found.executable.prompts:
            own = [m for place in steps.weights if (m := owners[place]()) is not None]
            if self.fp8_layers is not None:
                for layer in own:
                    self.fp8_layers.leave(layer, "runs once per prompt")
            kept.append(KeptPrompt(steps, self.prompts, own[0], layers))
        return kept

    def _recorded_aside(
        self, module: nn.Module, args: Any, kwargs: Any, opaque: tuple[nn.Module, ...], once: bool
    ) -> tuple[Recorded | str, Any]:
        """A recording with copies of the caches among the inputs. If its run is this call, the
        caches take over what it has written."""
        caches = CacheCopies.of(module, args, kwargs)
        if caches is None:
            return self._recorded(module, args, kwargs, opaque)
        found, result = self._recorded(module, *caches.given(), opaque)
        if once and result is not None:
            caches.take_over()
        return found, result

    def _recorded(
        self, module: nn.Module, args: Any, kwargs: Any, opaque: tuple[nn.Module, ...]
    ) -> tuple[Recorded | str, Any]:
        try:
            with eagerly():
                if waits(module) or any(map(remembers, opaque)):
                    recording.rehearse(module, args, kwargs, opaque)
                made = recording.record(module, args, kwargs, opaque)
        except CannotRecord as no:
            return str(no), None
        result, made.results = made.finish(made.results, args, kwargs), []
        if why := unknown_constant(module, made):
            return why, result
        merge_heads_where_they_lie(made.graph, self._attends_alike)
        if not self.exact and self.fp8_layers is None:
            take_gelu_into_products(made.graph)
            split_products_of_concatenations(made.graph)
        take_bias_out_of_convolutions(made.graph)
        if self.fp8_layers is None:  # an fp8 GEMM adds the bias itself
            take_bias_out_of_products(made.graph)
        device = next((t.device for t in made.given(args, kwargs) if t.is_cuda), None)
        inputs = made.inputs(module, args, kwargs)
        if device is not None:
            self._rewrite_products(module, made, inputs)
        if self.fp8_layers is not None:
            quantises = partial(self._products.quantises, module, made)
            take_activations_into_products(made.graph, quantises)
        if device is not None:
            copy_rows_of_products(made.graph, partial(self._products.copied, made, inputs))
        if self.fp8_layers is not None:
            mark_rows(made.graph, partial(self._products.reads_rows, module, made))
        kind = type(module).__name__
        try:
            found = self._planned(device, kind, made)
        except CannotIndex as no:
            return str(no), result
        if why := little_to_gain(found.plan.ops, found.kernels):
            return why, result
        return found, result

    def _planned(self, device: torch.device | None, kind: str, made: Recording) -> Recorded:
        """The programs of a recording: kernels on a GPU."""
        kernels = Kernels(self.exact)
        plan = planning.plan(made, None if device is None else kernels.why_not)
        programs = [step for step in plan.steps if isinstance(step, Program)]
        if not self.exact:  # plans of this block and a neighbour may store less
            stored = {s.target for program in programs for s in program.stores}
            for node in made.graph.nodes:
                if node.name in stored:
                    node.meta[ROUNDED] = True
        launched = {} if device is None else kernels.launched(programs, plan.values, device)
        runner = ProgramSites(kind, programs, launched, self.fell_back)
        on_cpu = device is None and self.fp8_layers is None
        products = None if on_cpu else self._products.of
        asked = None if self.exact else partial(lengths_of, self._lengths)
        rows = {} if self.fp8_layers is None else {"keep_rows": self.fp8_layers.rows_made}
        executable = Executable(
            *(plan, runner, products, asked, runner.launcher, self._attention), **rows
        )
        again = partial(self._planned_again, device)
        return Recorded(kind, made, executable, len(programs), plan, again)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        scale: float | None,
        grouped: bool,
        backends: Sequence[int],
    ) -> Tensor:
        """Attention of a recorded block by the fastest kernel of the tier, in `exact` by PyTorch's;
        with the numbers of a mask made once for all blocks."""
        plain = query.ndim == 4 and not dropout and not backends
        if plain and mask is not None and mask.dtype is torch.bool:
            mask = self._in_numbers(mask, query, key, value, causal, scale, grouped)
        if not plain or self.exact or not torch_attends():
            return plain_attention(
                query, key, value, mask, dropout, causal, scale, grouped, backends
            )
        fastest = partial(attention, query, key, value, mask, scale, causal)
        if self.fp8_layers is None or mask is not None or causal:
            return fastest()
        y = self.fp8_layers.attention(query, key, value, fastest, scale)
        return fastest() if y is None else y

    def _in_numbers(
        self,
        mask: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        scale: float | None,
        grouped: bool,
    ) -> Tensor:
        """The numbers that a kernel adds for the truth values of a mask, if blocks may share them;
        otherwise the mask."""
        numbers = None
        if self.exact:
            by = partial(attention_choice, query, key, value, scale=scale, grouped=grouped)
            choice = by(mask=mask)
            numbers = numbers_of(self._numbers, choice, query, mask)
            if numbers is not None and by(mask=numbers) != choice:
                return mask
        elif torch_attends() and kernel_of(query, key, value, mask, scale, causal) in ADDING:
            numbers = infinities_of(self._numbers, query, mask)
        return mask if numbers is None else numbers

    def _attends_alike(self, node: fx.Node) -> bool:
        """Whether attention may be given queries and keys with the heads of a token together: in
        `exact` if it then has the same bits, tried on random numbers."""
        if not self.exact:
            return True
        query, key, value, mask, *how = node.args
        likes = [x.meta["val"] for x in (query, key, value)]
        if self.same_bits is None or mask is not None or any(0 in x.stride() for x in likes):
            return False
        drawn = torch.Generator(likes[0].device).manual_seed(0)
        layouts = [(x.shape, x.stride()) for x in likes]
        q, k, v = (
            torch.empty_strided(*layout, dtype=x.dtype, device=x.device).normal_(generator=drawn)
            for layout, x in zip(layouts, likes, strict=True)
        )
        together = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
        return self.same_bits(
            f"heads of a token together: {layouts}, {how}, {sdp_backends()}",
            q,
            (),
            False,
            lambda: plain_attention(together[0], together[1], v, None, *how),
            lambda: plain_attention(q, k, v, None, *how),
        )

    def _rewrite_products(
        self, module: nn.Module, made: Recording, inputs: Sequence[Tensor]
    ) -> None:
        """For a GPU: on a CPU, PyTorch's functions of parts of a tensor have other bits than of a
        whole one."""
        join_products_of_one_input(made.graph, partial(self._products.join, module, made, inputs))
        if self.fp8_layers is None:
            multiply_whole_rows(made.graph, partial(self._products.whole, made, inputs))

    def _planned_again(
        self, device: torch.device | None, kind: str, made: Recording
    ) -> Recorded | None:
        try:
            return self._planned(device, kind, made)
        except CannotIndex:
            return None


def places_of(root: nn.Module, names: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
    """Where a module holds the weights of these names."""
    found = []
    for name in names:
        path, _, last = name.rpartition(".")
        module = root.get_submodule(path)
        holder = module._parameters if last in module._parameters else module._buffers
        found.append((holder, last))
    return found

"""Times one training step of whole models: forward, loss and backward.

Each configuration trains a fresh copy of the same model with AdamW. Its losses and the gradients of
the first step are compared with eager's, bit for bit, with PyTorch's deterministic algorithms and
an attention that repeats itself: its backward adds in any order otherwise, and eager's gradients
differ from run to run. "exact" must give every gradient and loss that a second eager run gives
again. Then steps are timed with PyTorch's defaults.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from .. import models, place
from ..backends.torch_internals import pytree
from ..close_names import suggestion
from ..errors import BadSetting, CannotRun
from ..measure import configs, results
from ..measure.results import environment_of
from ..measure.timing import milliseconds, wait
from ..models.catalog import preset as preset_named
from .liger_kernels import liger
from .models import Unavailable, Wrong, _fresh, _memory, _reason, _sizes
from .training_setup import (
    ATTENTION,
    add_lora,
    attention,
    checkpoint,
    deterministic,
    promise_deterministic_products,
    repeatable,
)

CONFIGS = (*configs.CONFIGS, "liger")
DEFAULT = (
    *("eager", "compile", "compile+graphs", "exact", "exact+graphs", "fused", "fused+graphs"),
    "liger",
)
# AdamW's; large enough that twenty losses differ, small enough that none is infinite
RATE = 1e-4
# steps before the timed ones: a block whose gradients have other strides than expected is compared
# again in the second, which takes time and memory
WARM_UP = 3
# the graphs of deterministic algorithms give way to others after eight
WARM_UP_GRAPHS = 12


@dataclass(frozen=True)
class Setup:
    """What is trained, and how; the same for every configuration."""

    preset: str
    lora: int | None = None
    checkpointing: bool = False
    attention: str = "default"
    steps: int = 20
    tiny: bool = False
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    layers: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    def row(self, config: str) -> dict[str, Any]:
        """What a row says before anything is measured."""
        depth = {} if self.layers is None else {"layers": self.layers}
        return {
            "model": self.preset,
            "tiny": self.tiny,
            "sizes": {**_sizes(self.preset, self.tiny), **self.sizes, **depth},
            "dtype": str(self.dtype).removeprefix("torch."),
            "lora": self.lora,
            "checkpointing": self.checkpointing,
            "attention": self.attention,
            "config": config,
        }

    def model(self) -> nn.Module:
        where: dict[str, Any] = {"tiny": self.tiny, "device": self.device, "dtype": self.dtype}
        model = models.build(self.preset, layers=self.layers, **where).train()
        if self.lora is not None:
            add_lora(model, self.lora)
        if self.checkpointing:
            checkpoint(model)
        return model

    def loss(self) -> Callable[[Callable[..., Any]], Tensor]:
        """The loss of a model on one batch: of the next token for a language model, else the
        squared distance to noise."""
        inputs = models.inputs(
            self.preset, tiny=self.tiny, device=self.device, dtype=self.dtype, **self.sizes
        )
        return batch_loss(inputs)


def batch_loss(inputs: Mapping[str, Any]) -> Callable[[Callable[..., Any]], Tensor]:
    if "input_ids" in inputs:
        given = {**inputs, "labels": inputs["input_ids"], "use_cache": False}
        given.pop("logits_to_keep", None)  # the loss is that of all tokens
        return lambda run: run(**given).loss
    target: list[Tensor] = []

    def of(run: Callable[..., Any]) -> Tensor:
        leaves = pytree.tree_leaves(run(**inputs))
        out = next(t for t in leaves if isinstance(t, Tensor) and t.is_floating_point())
        if not target:
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
            target.append(noise.to(out.device, out.dtype))
        return (out.float() - target[0].float()).square().mean()

    return of


@dataclass
class Trained:
    """The losses of a run in order, and the gradients of its first step by name."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    first_s: float

    def same_gradients(self, other: Trained) -> set[str]:
        return {
            name
            for name, grad in self.gradients.items()
            if name in other.gradients and torch.equal(grad, other.gradients[name])
        }

    def same_losses(self, other: Trained) -> int:
        """How many losses in a row, from the first, are the same."""
        pairs = zip(self.losses, other.losses, strict=True)
        return next(
            (i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)), len(self.losses)
        )


def train(
    model: nn.Module,
    run: Callable[..., Any],
    loss_of: Callable[[Callable[..., Any]], Tensor],
    steps: int,
) -> Trained:
    """Train `model`, whose forward is `run`, with AdamW."""
    wanted = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(list(wanted.values()), lr=RATE)
    found = Trained([], {}, 0.0)
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(run)
        loss.backward()
        if not found.losses:
            wait()
            found.first_s = time.perf_counter() - begin
            found.gradients = {n: p.grad.clone() for n, p in wanted.items() if p.grad is not None}
        found.losses.append(loss.detach().clone())
        optimizer.step()
    return found


def measure(
    setup: Setup, names: Sequence[str], seconds: float = 2.0, with_error: bool = True
) -> Generator[dict[str, Any]]:
    """One row a configuration: milliseconds a step, peak memory, and how many gradients and losses
    are eager's. A configuration that fails gets a row with the reason."""
    rows = [setup.row(name) for name in names]
    try:
        eager, again = (_eager(setup) for _ in range(2))
        truth = _truth(setup) if with_error else None
    except Exception as error:
        yield from (row | {"failed": f"the model: {_reason(error)}"} for row in rows)
        return
    for row in rows:
        try:
            row |= _measure(setup, row["config"], eager, again, truth, seconds)
        except Wrong as wrong:
            row["failed"] = str(wrong)
        except Unavailable as no:
            row |= {"failed": str(no), "unavailable": True}
        except Exception as error:
            row["failed"] = _reason(error)
            # a peer that PyTorch cannot run here is no fault of ours
            row |= {"unavailable": True} if configs.is_peer(row["config"]) else {}
        yield row


def _eager(setup: Setup) -> Trained:
    _fresh()
    model = setup.model()
    with repeatable(setup.attention), deterministic():
        return train(model, model, setup.loss(), setup.steps)


def _measure(
    setup: Setup,
    config: str,
    eager: Trained,
    again: Trained,
    truth: dict[str, Tensor] | None,
    seconds: float,
) -> dict[str, Any]:
    _fresh()
    model, loss_of = setup.model(), setup.loss()
    with ExitStack() as stack:
        try:
            if config == "liger":
                stack.enter_context(liger(model))
                run: Any = model
                report = None
            else:
                run, report = configs.configured(model, config, stack, trains=True)
        except (ValueError, CannotRun) as no:
            raise Unavailable(str(no)) from None
        stack.enter_context(attention(setup.attention))
        with repeatable(setup.attention), deterministic():
            got = train(model, run, loss_of, setup.steps)
        repeated = eager.same_gradients(again)
        same = got.same_gradients(eager)
        row: dict[str, Any] = {
            "first_s": got.first_s,
            "gradients": len(eager.gradients),
            "gradients_repeated": len(repeated),
            "gradients_equal": len(same),
            "losses": setup.steps,
            "losses_repeated": again.same_losses(eager),
            "losses_equal": got.same_losses(eager),
            "error": None if truth is None else distance(got.gradients, truth),
            "eager_error": None if truth is None else distance(eager.gradients, truth),
        }
        if report is not None:
            row["replaced"] = report.replaced
            row["problems"] = report.to_dict()["problems"]
            row["graphs"] = report.graph_lines
        _check(config, row, repeated - same)
        del got
        parameters = [p for p in model.parameters() if p.requires_grad]

        def step() -> None:
            for p in parameters:
                p.grad = None
            loss_of(run).backward()

        for _ in range(WARM_UP_GRAPHS if "graphs" in config else WARM_UP):
            step()  # compiles, plans and captures for PyTorch's defaults
        if report is not None:
            row["graphs"] = report.graph_lines
        _fresh()
        row["ms"] = milliseconds(step, seconds)
        return row | _memory()


def _check(config: str, row: Mapping[str, Any], lost: set[str]) -> None:
    """Raise Wrong if "exact" has a gradient or a loss that is not eager's, though eager repeats
    it; the other configurations make no promise about bits."""
    if configs.tier_of(config) != "exact" or "compile" in config:
        return
    if lost:
        raise Wrong(
            f"{config}: {len(lost)} of {row['gradients']} gradients are not eager's, "
            f"{min(lost)} the first by name"
        )
    if row["losses_equal"] < row["losses_repeated"]:
        raise Wrong(f"{config}: loss {row['losses_equal'] + 1} is not eager's")


def _truth(setup: Setup) -> dict[str, Tensor] | None:
    """The gradients of the first step of the same weights in float32, of float32 in float64."""
    wide = torch.float64 if setup.dtype == torch.float32 else torch.float32
    _fresh()
    try:
        # a module may keep some weights in float32; `to` of a library would leave out others
        model = nn.Module.to(copy.deepcopy(setup.model()), wide)
        inputs = models.inputs(
            setup.preset, tiny=setup.tiny, device=setup.device, dtype=setup.dtype, **setup.sizes
        )
        widened = pytree.tree_map(
            lambda t: t.to(wide) if isinstance(t, Tensor) and t.is_floating_point() else t, inputs
        )
        with attention(setup.attention):
            batch_loss(widened)(model).backward()
    except torch.OutOfMemoryError:
        return None
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def distance(gradients: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """|g - t| / |t| over all gradients together."""
    off = sum((gradients[n].double() - t.double()).square().sum() for n, t in truth.items())
    size = sum(t.double().square().sum() for t in truth.values())
    return float((off / size) ** 0.5)


def run(
    presets: Sequence[str],
    names: Sequence[str] | None,
    sizes: dict[str, int],
    *,
    lora: int | None = None,
    checkpointing: bool = False,
    attention: str = "default",
    steps: int = 20,
    tiny: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    seconds: float = 2.0,
    with_error: bool = True,
    layers: int | None = None,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Measure presets in turn; writes the rows so far to `out` after each."""
    chosen = list(names or DEFAULT)
    for name in chosen:
        if name not in CONFIGS:
            near = suggestion(name, CONFIGS, "kernelwright bench train --help")
            raise BadSetting("--config", f"no configuration {name!r}; {near}")
    if attention not in ATTENTION:
        raise ValueError(f"--attention {attention!r}, expected any of {', '.join(ATTENTION)}")
    if lora is not None and lora < 1:
        raise ValueError(f"--lora {lora}, expected a rank of 1 or more")
    for preset in presets:
        preset_named(preset).check(layers=layers, **sizes)
    if out is not None:
        results.check_writable(out)
    at = place.choose_device(device, tiny=tiny)
    promise_deterministic_products(at)
    rows: list[dict[str, Any]] = []
    where = environment_of(at) if out is not None else {}
    with ExitStack() as stack:
        if at.type == "cuda":
            stack.enter_context(torch.cuda.device(at))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        task = progress.add_task("training", total=len(presets) * len(chosen))
        for preset in presets:
            setup = Setup(
                preset,
                lora,
                checkpointing,
                attention,
                steps,
                tiny,
                str(at),
                place.choose_dtype(dtype, at),
                layers,
                sizes,
            )
            with closing(measure(setup, chosen, seconds, with_error)) as measured:
                for row in measured:
                    rows.append(row | {"device": at.type})
                    progress.advance(task)
                    if out is not None:
                        results.write(out, "training", rows, environment=where)
    return rows

"""What the ops are compared with: PyTorch, torch.compile, Liger and QuACK."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from ..ops.glu.reference import halves
from ..ops.op import Composite, Op

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Way:
    """One implementation of an op: `call(prepare(arguments))`, where only `call` is timed. A call
    may overwrite what `prepare` made."""

    call: Callable[[Any], Any]
    prepare: Callable[[Arguments], Any]


@dataclass(frozen=True)
class Peer:
    """`name` is its name for --peers, `column` its name in rows and tables. `way` gives None where
    the peer does not have the op, or does not take these arguments."""

    name: str
    column: str
    way: Callable[[Op | Composite, Arguments], Way | None]
    module: str | None = None
    package: str = ""

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot be measured here, and what to do; None if it can."""
        if self.module is None:
            return None
        if find_spec(self.module) is None:
            return f"{self.name} is not installed: pip install '{self.package}'"
        if device.type != "cuda":
            return f"{self.name} needs a CUDA GPU: leave it out of --peers"
        return None

    @property
    def version(self) -> str | None:
        try:
            return version(self.package.split("=")[0]) if self.module else torch.__version__
        except PackageNotFoundError:
            return None


def eager(op: Op | Composite) -> Callable[..., Any]:
    """The fastest eager form: the chain of PyTorch's own functions where the op has one."""
    return op.exact.get("torch") or next(iter(op.exact.values()), op.reference)


def given(op: Op | Composite, function: Callable[..., Any]) -> Way:
    """`function`, called with the op's own arguments."""
    if isinstance(op, Op):
        names = op.arguments
        return Way(lambda a: function(*a), lambda a: tuple(a[n] for n in names))
    return Way(lambda a: function(**a), dict)


def _torch(op: Op | Composite, arguments: Arguments) -> Way:
    return given(op, eager(op))


def _compile(op: Op | Composite, arguments: Arguments) -> Way:
    torch.compiler.reset()
    return given(op, torch.compile(eager(op), fullgraph=True, dynamic=False))


def _liger(op: Op | Composite, a: Arguments) -> Way | None:
    if op.name not in LIGER:
        return None
    class_name, prepare = LIGER[op.name]
    if prepare(a) is None:
        return None
    function = getattr(importlib.import_module("liger_kernel.ops"), class_name).apply
    return Way(lambda values: function(*values), prepare)


def _gated(a: Arguments) -> tuple[Any, ...] | None:
    """Liger takes two tensors: the halves are split before timing."""
    if a.get("approximate") is False:
        return None
    return tuple(half.contiguous() for half in halves(a["input"], a["gate"]))


def _turned_by_liger(a: Arguments) -> tuple[Any, ...] | None:
    """[B, H, S, D] with the memory layout [B, S, H, D]; Liger rotates in place, so copies."""
    if a["layout"] != "half" or a["cos"].ndim != 4 or a["cos"].shape[1] != 1:
        return None
    if a["cos"].shape[-1] != a["query"].shape[-1]:
        return None
    rows = (a[n].transpose(1, 2).clone(memory_format=torch.contiguous_format) for n in _QK)
    return (*(x.transpose(1, 2) for x in rows), a["cos"], a["sin"])


_QK = ("query", "key")
_MODULATED = ("input", "weight", "scale", "shift", "eps")
# for each op Liger's function, and its arguments, None for a case that it does not have
LIGER: dict[str, tuple[str, Callable[[Arguments], tuple[Any, ...] | None]]] = {
    "rmsnorm": ("LigerRMSNormFunction", lambda a: (a["input"], a["weight"], a["eps"])),
    "rmsnorm_residual": (
        "LigerFusedAddRMSNormFunction",
        lambda a: _all_there(a["input"], a["residual"], a["weight"], a["eps"]),
    ),
    "layernorm": (
        "LigerLayerNormFunction",
        lambda a: _all_there(a["input"], a["weight"], a["bias"], a["eps"]),
    ),
    "adaln_rmsnorm": (
        "LigerModulatedRMSNormFunction",
        lambda a: None if a["scale"] is None else tuple(a[n] for n in _MODULATED),
    ),
    "geglu": ("LigerGELUMulFunction", _gated),
    "swiglu": ("LigerSiLUMulFunction", _gated),
    "silu_mul": ("LigerSiLUMulFunction", lambda a: (a["gate"], a["up"])),
    "apply_rope_qk": ("LigerRopeFunction", _turned_by_liger),
}


def _all_there(*values: Any) -> tuple[Any, ...] | None:
    return None if any(v is None for v in values) else values


def _quack(op: Op | Composite, a: Arguments) -> Way | None:
    if op.name == "rmsnorm":
        norm = importlib.import_module("quack.rmsnorm").rmsnorm
        return Way(lambda v: norm(v[0], v[1], eps=v[2]), lambda a: tuple(a[n] for n in _NORM))
    if op.name == "rmsnorm_residual":
        norm = importlib.import_module("quack.rmsnorm").rmsnorm
        return Way(
            lambda v: norm(v[0], v[1], residual=v[3], eps=v[2], prenorm=True),
            lambda a: tuple(a[n] for n in (*_NORM, "residual")),
        )
    if op.name == "layernorm" and a["weight"] is not None:
        norm = importlib.import_module("quack.rmsnorm").layernorm_fwd
        return Way(lambda v: norm(*v).view(a["input"].shape), _rows_for_quack)
    if op.name == "apply_rope" and a["x"].ndim == 4 and a["cos"].ndim == 2:
        turn = importlib.import_module("quack.rotary").apply_rotary_emb
        return Way(lambda v: turn(*v), _turned_by_quack)
    return None


_NORM = ("input", "weight", "eps")


def _rows_for_quack(a: Arguments) -> tuple[Any, ...]:
    """QuACK's layernorm takes rows, and weight and bias in float32."""
    rows = a["input"].reshape(-1, a["input"].shape[-1])
    bias = None if a["bias"] is None else a["bias"].float()
    return rows, a["weight"].float(), bias, a["eps"]


def _turned_by_quack(a: Arguments) -> tuple[Any, ...]:
    """QuACK's tables have one column a pair."""
    interleaved = a["layout"] == "interleaved"
    tables = [a["cos"], a["sin"]]
    width = a["x"].shape[-1]
    if tables[0].shape[-1] == width:
        tables = [t[..., ::2] if interleaved else t[..., : width // 2] for t in tables]
    return (a["x"], *(t.contiguous() for t in tables), interleaved)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch", "eager", _torch),
        Peer("compile", "compile", _compile),
        Peer("liger", "liger", _liger, "liger_kernel", "liger-kernel==0.8.5"),
        Peer("quack", "quack", _quack, "quack", "quack-kernels"),
    )
}
# compiling takes a minute on a CPU, and says nothing about a GPU
ON_CPU = ("torch",)

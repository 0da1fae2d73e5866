"""The GPUs of this machine according to nvidia-smi, and which of them are idle."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

import torch

# a GPU is idle up to these limits: a bare driver context holds a few MiB
IDLE_MIB = 32
IDLE_PERCENT = 5
_SMI_FIELDS = "uuid,index,name,driver_version,compute_cap,memory.total,memory.used,utilization.gpu"


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in MiB; `idle` is None where nvidia-smi cannot tell."""

    index: int
    name: str
    capability: tuple[int, int]
    memory: int
    used: int | None
    busy_percent: int | None
    processes: int | None

    @property
    def idle(self) -> bool | None:
        if self.used is None or self.busy_percent is None or self.processes is None:
            return None
        return self.processes == 0 and self.used <= IDLE_MIB and self.busy_percent <= IDLE_PERCENT


def nvidia_smi() -> tuple[str | None, tuple[Gpu, ...], str | None]:
    """Driver version, GPUs and, if nvidia-smi exists but fails, its error message."""
    if shutil.which("nvidia-smi") is None:
        return None, (), None
    try:
        listed = _smi(f"--query-gpu={_SMI_FIELDS}")
        apps = [row[0] for row in _smi("--query-compute-apps=gpu_uuid,pid")]
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stdout", None) or str(error)).strip().splitlines()
        return None, (), said[0] if said else "no answer"
    gpus = []
    for uuid, index, name, _, capability, memory, used, busy in listed:
        major, minor = capability.split(".")
        gpus.append(
            Gpu(
                index=int(index),
                name=name,
                capability=(int(major), int(minor)),
                memory=_number(memory) or 0,
                used=_number(used),
                busy_percent=_number(busy),
                processes=apps.count(uuid),
            )
        )
    return (listed[0][3] if listed else None), tuple(gpus), None


def _smi(query: str) -> list[list[str]]:
    ran = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return [
        [c.strip() for c in line.split(",")] for line in ran.stdout.splitlines() if line.strip()
    ]


def _number(text: str) -> int | None:
    """A field of nvidia-smi, which writes [N/A] where it does not know."""
    return int(text) if text.isdigit() else None


def torch_gpu(index: int) -> Gpu:
    """A GPU as torch sees it, where there is no nvidia-smi."""
    properties = torch.cuda.get_device_properties(index)
    memory = properties.total_memory >> 20
    capability = (properties.major, properties.minor)
    return Gpu(index, properties.name, capability, memory, None, None, None)

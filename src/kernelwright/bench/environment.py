"""The environment of a run on one device."""

from __future__ import annotations

from typing import Any

import torch

from . import results


def environment_of(device: torch.device) -> dict[str, Any]:
    """That of `results`, without the GPU if it took no part."""
    found = results.environment()
    return found if device.type == "cuda" else {**found, "gpu": None}

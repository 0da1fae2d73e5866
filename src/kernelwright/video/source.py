"""The pipeline: real weights from a folder or the Hub, or random ones."""

from __future__ import annotations

from typing import Any

import torch

from .. import models
from ..backends import installed
from ..errors import BadSetting, CannotRun


def pipeline(
    model: str | None, *, tiny: bool = False, dtype: torch.dtype, device: torch.device
) -> Any:
    """diffusers' LTXPipeline: from a folder, from the Hub, or, for None, with random weights."""
    if not installed("diffusers") or not installed("transformers"):
        raise CannotRun("diffusers is not installed: pip install 'kernelwright[models]'")
    if model is None:
        pipe = models.ltx_pipeline(tiny=tiny, dtype=dtype, device=device)
    else:
        pipe = _loaded(model, tiny, dtype, device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _loaded(model: str, tiny: bool, dtype: torch.dtype, device: torch.device) -> Any:
    if tiny:
        raise BadSetting("--tiny", "has random weights: leave --model or --tiny out")
    try:
        # read the configs first: a wrong class fails before gigabytes are loaded
        found = type(models.load(model, device="meta")).__name__
        if found != "LTXPipeline":
            raise BadSetting("--model", f"{model!r} is a {found}, expected an LTXPipeline")
        return models.load(model, dtype=dtype, device=device)
    except BadSetting:
        raise
    except (OSError, ValueError) as error:
        raise BadSetting("--model", str(error)) from None

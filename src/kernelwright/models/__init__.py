"""Models to try kernels on: presets built from their configs alone, and loaded models.

A preset has the structure of a published model, full size or tiny, and random weights. Nothing is
downloaded:

    model = build("ltx-video", tiny=True)
    output = model(**inputs("ltx-video", tiny=True))[0]
"""

from __future__ import annotations

from .catalog import build, family_of, inputs, presets, table
from .loading import load
from .pipeline import ltx_pipeline
from .preset import Preset

__all__ = ["Preset", "build", "family_of", "inputs", "load", "ltx_pipeline", "presets", "table"]

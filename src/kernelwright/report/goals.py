"""How much faster than eager and than torch.compile models are to be on an H200."""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """Speed-ups of exact and of fused over eager and over torch.compile, of fp8 over eager."""

    exact: float
    exact_compile: float
    fused: float
    fused_compile: float
    fp8: float


GOALS = {
    "ltx-video 49f 768×512 batch 2": Goal(1.65, 1.1, 1.85, 1.22, 2.4),
    "ltx-video 25f 704×480 batch 2": Goal(1.8, 1.15, 2.0, 1.25, 2.4),
    "ltx-video 161f 768×512 batch 2": Goal(1.4, 1.03, 1.5, 1.12, 1.75),
    "flux-dev 1024×1024": Goal(1.4, 1.05, 1.55, 1.2, 2.0),
    "sd3.5-medium 1024×1024 batch 2": Goal(1.6, 1.0, 1.85, 1.15, 2.0),
    "wan-1.3b 81f 832×480": Goal(1.2, 1.03, 1.25, 1.08, 1.4),
    "llama-3-8b 4096 tokens": Goal(1.3, 1.25, 1.35, 1.3, 1.9),
}

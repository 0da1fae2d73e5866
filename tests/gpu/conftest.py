"""Everything here needs an NVIDIA GPU; without one, one line says so."""

from pathlib import Path

import torch

if not torch.cuda.is_available():
    speaks = "test_kernels.py"
    collect_ignore = [p.name for p in Path(__file__).parent.glob("test_*.py") if p.name != speaks]

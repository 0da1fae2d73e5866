"""The CUDA kernels of kernelwright, compiled ahead of time: its backend "aot" finds them here."""

from pathlib import Path

import torch

(_library,) = Path(__file__).parent.glob("_ltx_kernels_aot_*.so")
ops = getattr(torch.ops, _library.name.partition(".")[0])
if not hasattr(ops, "launch"):  # another package may have loaded the same library
    torch.ops.load_library(str(_library))

"""Whether kernels have the bits of the installed PyTorch.

Every sum and function that they repeat is compared with it, over widths and values. What is found
decides which kernels exact modes may run.
"""

from .calibrate import Finding, calibrate, dependents, verdicts

__all__ = ["Finding", "calibrate", "dependents", "verdicts"]

"""What `kernelwright check` compiles for one op, for all of them."""

from kernelwright.checking.planned_kernels import TARGETS, Kernel, kernels, usage

__all__ = ["TARGETS", "Kernel", "kernels", "usage"]

"""Fusing any module: its forward written down as ATen ops, and planned as few kernels."""

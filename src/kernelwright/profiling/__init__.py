"""Which kernels take the time of a model, at three levels: torch.profiler, nsys and ncu."""

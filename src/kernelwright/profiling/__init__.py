"""Where the time of a model goes, at three levels: torch.profiler, nsys and ncu."""

"""CUDA graphs of whole models: when to capture, what a graph assumes, how it is replayed."""

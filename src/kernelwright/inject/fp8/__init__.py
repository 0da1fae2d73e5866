"""Linear layers in fp8: which, their weights, and activations quantised by the op before."""

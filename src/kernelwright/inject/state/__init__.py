"""What cached results depend on: modules, hooks, PyTorch's switches, values of tensors."""

"""What a kept result depends on: modules, hooks, switches of the process, values of tensors."""

"""Blocks while gradients are recorded: forward and backward as programs, with eager's bits."""

"""Computed once and used again: rotary tables, values of a prompt, packed weights."""

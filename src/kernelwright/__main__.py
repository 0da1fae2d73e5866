"""`python -m kernelwright` is the `kernelwright` command."""

from .cli import app

app(prog_name="kernelwright")

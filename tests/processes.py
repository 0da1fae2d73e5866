"""Processes for tests, forked from a server that has imported the slow libraries."""

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = ["kernelwright.backends.cuda", "diffusers.models.transformers.transformer_ltx"]


def forked() -> ForkServerContext:
    """A context whose processes start in milliseconds; none of them is a fork of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context

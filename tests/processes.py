"""Processes of a test's own, made from one that has imported what is slow to import."""

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = ["kernelwright.backends.cuda", "diffusers.models.transformers.transformer_ltx"]


def forked() -> ForkServerContext:
    """A context whose processes start in milliseconds; none of them is a copy of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context

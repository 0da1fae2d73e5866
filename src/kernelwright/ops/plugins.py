"""Ops of other packages: each names its module in the entry point group `kernelwright.ops`.

    [project.entry-points."kernelwright.ops"]
    my_op = "my_op"

They are imported on the first call of `registry`, not with kernelwright itself.
"""

from __future__ import annotations

import functools
from importlib.metadata import entry_points

from ..backends.user_warnings import warn

# a Hub package is a copy of this folder under another name: it does not load our plug-ins
GROUP = f"{__name__.partition('.')[0]}.ops"


@functools.cache
def load() -> None:
    """Import every package that adds ops. One that fails to import gives a warning."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            warn(
                f"the ops of {entry.value!r} are left out, its import fails: {error}; mend it, or "
                f"pip uninstall {package}"
            )

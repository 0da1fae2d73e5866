"""What runs by default of cases that repeat one path with another class, dtype or GPU.

A test names its whole set, and `share` deals it out: neighbouring tests take other parts, so that
each member is in some of them. KERNELWRIGHT_EVERYTHING=1 runs all of each set, as before a release.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

EVERYTHING = os.environ.get("KERNELWRIGHT_EVERYTHING", "0") not in ("", "0")


def share(cases: Iterable[T], of: int, start: int = 0) -> list[T]:
    """Every `of`-th case, counted from `start`; all of them if everything was asked for."""
    found = list(cases)
    return found if EVERYTHING else found[start % of :: of]

"""The error bound of the library, which also applies to ops of other packages."""

from kernelwright.checking.numerics import (
    Error,
    as_good_as_eager,
    as_tuple,
    errors_over_draws,
    hold_case,
    in_eager,
    in_float64,
    run,
    ulp,
    widened,
)

__all__ = [
    "Error",
    "as_good_as_eager",
    "as_tuple",
    "errors_over_draws",
    "hold_case",
    "in_eager",
    "in_float64",
    "run",
    "ulp",
    "widened",
]

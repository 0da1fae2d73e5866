"""One call makes a model use the kernels, one call undoes it."""

from __future__ import annotations

from .engine import inject, injected, inspect, restore
from .report.report import Report

__all__ = ["Report", "inject", "injected", "inspect", "restore"]

"""Every op by its name: `Op` and `Composite` add themselves here, `op.registry` reads it."""

from __future__ import annotations

from typing import Any

declared: dict[str, Any] = {}
# steps of other ops: profiled like them, but not listed
internal: dict[str, Any] = {}

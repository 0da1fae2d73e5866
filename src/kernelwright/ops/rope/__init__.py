"""Rotary position embedding: by given tables, and on a line or a video grid."""

from .apply import apply_rope, apply_rope_qk
from .grid import rope_1d, rope_3d, rope_3d_extended

__all__ = ["apply_rope", "apply_rope_qk", "rope_1d", "rope_3d", "rope_3d_extended"]

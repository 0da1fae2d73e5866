"""Measurements: timing, exactness against eager, and the result files they are kept in."""

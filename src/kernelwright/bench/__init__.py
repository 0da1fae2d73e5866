"""Benchmarks of ops, models and denoising loops, and the check of exact modes against eager."""

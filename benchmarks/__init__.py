"""Benchmarks: one module per question, each run as ``python -m benchmarks.<module>``."""

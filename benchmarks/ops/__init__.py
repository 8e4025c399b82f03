"""Benchmarks of pyalloc.ops: `python -m benchmarks.ops`."""

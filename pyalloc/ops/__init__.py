"""Fused ops in place of memory-hungry PyTorch idioms, forward and backward, on CPU and CUDA."""

from pyalloc.ops._library import cpu_isa, set_cpu_isa
from pyalloc.ops.power_spherical import (
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
)

__all__ = [
    "cpu_isa",
    "power_spherical_log_prob",
    "power_spherical_mixture_log_prob",
    "set_cpu_isa",
]

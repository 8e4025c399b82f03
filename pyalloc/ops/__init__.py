"""Fused ops in place of memory-hungry PyTorch idioms, forward and backward, on CPU and CUDA."""

from pyalloc.ops import _flops
from pyalloc.ops._library import cpu_isa, set_cpu_isa
from pyalloc.ops.additive import AdditiveAttention, additive_attention, sequence_gradients
from pyalloc.ops.attention import scaled_attention
from pyalloc.ops.power_spherical import (
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
)

__all__ = [
    "AdditiveAttention",
    "additive_attention",
    "cpu_isa",
    "power_spherical_log_prob",
    "power_spherical_mixture_log_prob",
    "scaled_attention",
    "sequence_gradients",
    "set_cpu_isa",
]

_flops.register()

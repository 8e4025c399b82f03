"""Distributions on the sphere, built on pyalloc.ops."""

from pyalloc.distributions.power_spherical import HypersphericalUniform, PowerSpherical

__all__ = ["HypersphericalUniform", "PowerSpherical"]

"""A CUDA memory allocator for PyTorch: `import pyalloc; pyalloc.install()`."""

from pyalloc.config import Config
from pyalloc.errors import AllocatorError, ConfigError, InstallError, PyallocError
from pyalloc.install import Handle, install, status, uninstall
from pyalloc.pools import pool

__all__ = [
    "AllocatorError",
    "Config",
    "ConfigError",
    "Handle",
    "InstallError",
    "PyallocError",
    "install",
    "pool",
    "status",
    "uninstall",
]

"""A CUDA memory allocator for PyTorch: `import pyalloc; pyalloc.install()`.

(PYTEST_DONT_REWRITE: under `pyalloc run` this is imported before pytest, which would warn about it.)
"""

from pyalloc.common import starting  # noqa: F401  # first: for what it does
from pyalloc.common.config import Config
from pyalloc.errors import (
    AllocatorError,
    ConfigError,
    InstallError,
    OpError,
    PlanError,
    PyallocError,
    TraceError,
    UsageError,
)
from pyalloc.figures import add_scalars, scalars, stats
from pyalloc.inside.recording import record
from pyalloc.install import Handle, install, status, uninstall
from pyalloc.limits import get_limit, on_pressure, reserve, set_limit, trim
from pyalloc.marks import phase, step
from pyalloc.notebook import load_ipython_extension
from pyalloc.pools import pool
from pyalloc.tables import memory_table, snapshot

__version__ = "0.1.0"  # pyproject.toml reads it here

__all__ = [
    "AllocatorError",
    "Config",
    "ConfigError",
    "Handle",
    "InstallError",
    "OpError",
    "PlanError",
    "PyallocError",
    "TraceError",
    "UsageError",
    "__version__",
    "add_scalars",
    "get_limit",
    "install",
    "load_ipython_extension",
    "memory_table",
    "on_pressure",
    "phase",
    "pool",
    "record",
    "reserve",
    "scalars",
    "set_limit",
    "snapshot",
    "stats",
    "status",
    "step",
    "trim",
    "uninstall",
]

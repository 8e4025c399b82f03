"""Everything pyalloc raises, in one hierarchy, and the exit code each gives the command line."""

from __future__ import annotations


class PyallocError(Exception):
    """Base class of all errors of this package.  Messages say what to do next."""

    exit_code = 1


class ConfigError(PyallocError, ValueError):
    """A setting is unknown or malformed, or contradicts another."""

    exit_code = 2


class InstallError(PyallocError, RuntimeError):
    """pyalloc could not replace torch's allocator, or can no longer be removed."""

    exit_code = 3


class AllocatorError(PyallocError, RuntimeError):
    """The allocator rejected a call, or the device failed; nothing was changed."""

    exit_code = 4


class UsageError(PyallocError):
    """Something was requested that cannot be done, such as overwriting a file without --force."""

    exit_code = 2


class OpError(PyallocError, ValueError):
    """An argument of pyalloc.ops has the wrong shape, dtype or device, or its kernels are missing."""

    exit_code = 2


class PlanError(PyallocError, ValueError):
    """No plan can be made from a recording, or a file does not hold a plan."""

    exit_code = 2


class TraceError(PyallocError, ValueError):
    """A file is damaged, is not a trace or snapshot, or its content cannot be replayed."""

    exit_code = 2  # not 1: that is an answer of `pyalloc diff` and `pyalloc replay`

"""Everything pyalloc raises, in one hierarchy, and the exit code each gives the command line."""

from __future__ import annotations


class PyallocError(Exception):
    """Base of all errors of this package.  The message says what to do next."""

    exit_code = 1


class ConfigError(PyallocError, ValueError):
    """A setting is unknown, malformed or contradicts another."""

    exit_code = 2


class InstallError(PyallocError, RuntimeError):
    """pyalloc could not take over torch's allocator, or cannot be removed any more."""

    exit_code = 3


class AllocatorError(PyallocError, RuntimeError):
    """The allocator refused a call, or the device failed; nothing was changed."""

    exit_code = 4


class UsageError(PyallocError):
    """The command line asks for something that cannot be done, such as overwriting a file without --force."""

    exit_code = 2


class OpError(PyallocError, ValueError):
    """An argument of pyalloc.ops has the wrong shape, dtype or device, or its kernels are missing."""

    exit_code = 2


class PlanError(PyallocError, ValueError):
    """A plan cannot be made of a recording, or a file holds none."""

    exit_code = 2


class TraceError(PyallocError, ValueError):
    """A file is damaged or not a trace or snapshot, or what it holds cannot be replayed."""

    exit_code = 2  # not 1: that is an answer of `pyalloc diff` and `pyalloc replay`

"""pyalloc doctor."""

from __future__ import annotations

import argparse
import os
import platform
import textwrap
import warnings
from typing import Any

from pyalloc import __version__, _core
from pyalloc.common.config import ENVIRONMENT, Config
from pyalloc.common.folding import folded
from pyalloc.errors import ConfigError
from pyalloc.install import NO_DEVICE, install, status


class Command:
    """Check versions, device and driver, and whether pyalloc installs.

    Nothing is changed: pyalloc is installed in this process only, as a test.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """No arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Prints the findings; 0 when training on pyalloc would work here, else 1."""
        python = f"Python {platform.python_version()}"
        print(folded(f"pyalloc {__version__}, {python}, {platform.platform()}"))
        print(f"{ENVIRONMENT}={os.environ.get(ENVIRONMENT, '')}")
        try:
            config = Config.of()
        except ConfigError:  # its message refers to this list
            _print_options(Config())
            raise
        _print_options(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            install()
        found = status()
        print(folded(f"torch {found.torch_version or 'not found'}: {found.reason}"))
        if not found.installed:
            print(f"next: {_next(found.reason)}")
            return 1
        _print_devices()
        for line in status().lines():
            if not line.startswith("settings: "):  # already printed
                print(folded(line))
        return 0 if _allocation_works() else 1


def _print_options(config: Config) -> None:
    for option in config.options:
        print(f"  {option.name}:{option.value}")
        print(textwrap.fill(option.help, 79, initial_indent=" " * 6, subsequent_indent=" " * 6))


def _next(reason: str) -> str:
    if reason == NO_DEVICE:
        return "try a program without a GPU:\n      pyalloc dryrun python your_script.py"
    return "install the CUDA build of PyTorch (a dry run needs it too):\n      pip install torch"


def _print_devices() -> None:
    import torch

    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / 2**30
        compute = f"{properties.major}.{properties.minor}"
        print(folded(f"device {index}: {properties.name}, {gib:.1f} GiB, compute {compute}"))


def _allocation_works() -> bool:
    import torch

    try:
        tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        size = _core.block_info(tensor.data_ptr())[1]
    except RuntimeError as error:
        print(folded(f"an allocation of 1 MiB failed: {error}"))
        return False
    print(f"an allocation of 1 MiB works (a block of {size} bytes)")
    if _core.stats(tensor.device.index)["pyalloc_pages"] == 0:
        print(
            folded(
                "the memory came from cudaMalloc: the driver's virtual memory calls are switched off (vmm:false), "
                "missing, or failed when tried. Without them pyalloc cannot join pages and needs as much memory as "
                "torch's own allocator"
            )
        )
    return True

"""CUDA IPC: works for plain allocations; otherwise the error says what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from dry_support import dry_environment

pytestmark = pytest.mark.torch

SHARING = """
import gc, torch, torch.multiprocessing as mp
def work(inbox, outbox):
    tensor = inbox.get()
    outbox.put(tensor.cpu().tolist())
    del tensor
    gc.collect()
    inbox.get()
if __name__ == "__main__":
    tensor = torch.arange(1000).cuda()[100:110]
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=work, args=(inbox, outbox))
    child.start()
    inbox.put(tensor)
    assert outbox.get(timeout=600) == list(range(100, 110))
    inbox.put(None)
    child.join()
    assert child.exitcode == 0
"""


@pytest.mark.parametrize("install", [False, True])
def test_tensor_through_a_queue(install, dry_python, tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "sharing.py"
    script.write_text(SHARING)
    dry_python(
        f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')",
        install=install,
        env={"PYALLOC_CONF": "vmm:false"},
    )


SHARE = """
import torch
tensor = torch.arange(1000).cuda()
try:
    tensor.untyped_storage()._share_cuda_()
except RuntimeError as error:
    print(error)
assert torch.equal(tensor.cpu(), torch.arange(1000))
"""


def test_pages_of_the_virtual_memory_calls_cannot_be_shared(dry_python) -> None:  # type: ignore[no-untyped-def]
    assert "PYALLOC_CONF=vmm:false" in dry_python(SHARE, install=True).stdout


def preloaded(source: str, folder: Path, devices: int = 1) -> str:
    """LD_PRELOAD with these functions before the runtime's own."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    library = folder / "libwatch.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", library, "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return f"{library}:{dry_environment(install=True, devices=devices)['LD_PRELOAD']}"


def test_what_does_not_help_is_not_advised(dry_python, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A driver without IPC."""
    refusing = preloaded(
        "int cudaIpcGetMemHandle(void *handle, void *base) { return 801; }", tmp_path
    )
    said = dry_python(
        SHARE, install=True, env={"PYALLOC_CONF": "vmm:false", "LD_PRELOAD": refusing}
    ).stdout
    assert "gave 801" in said and "Send a CPU copy" in said and "vmm" not in said


# What a tensor's last owner calls: which device is current, and what an error of it leaves behind.
WATCH = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int
cudaIpcCloseMemHandle(void *base) {
    int device = -1;
    int (*get)(int *) = dlsym(RTLD_NEXT, "cudaGetDevice");
    int (*close)(void *) = dlsym(RTLD_NEXT, "cudaIpcCloseMemHandle");
    get(&device);
    printf("closed on %d\n", device);
    fflush(stdout);
    close(base);
    return close(base); /* fails: it is closed */
}
"""

CLOSING = """
import ctypes, gc, torch, torch.multiprocessing as mp
def work(inbox):
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    tensor = inbox.get()
    assert tensor.device.index == 1 and torch.cuda.current_device() == 0
    torch.cuda.synchronize()
    del tensor
    gc.collect()
    assert torch.cuda.current_device() == 0
    assert runtime.cudaPeekAtLastError() == 0
if __name__ == "__main__":
    tensor = torch.arange(1000).cuda(1)
    context = mp.get_context("spawn")
    inbox = context.Queue()
    child = context.Process(target=work, args=(inbox,))
    child.start()
    inbox.put(tensor)
    child.join()
    assert child.exitcode == 0
"""


def test_memory_is_closed_on_its_device(dry_python, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Wherever its last owner is; an error there is nobody else's."""
    script = tmp_path / "closing.py"
    script.write_text(CLOSING)
    done = dry_python(
        f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')",
        install=True,
        devices=2,
        env={"PYALLOC_CONF": "vmm:false", "LD_PRELOAD": preloaded(WATCH, tmp_path, devices=2)},
    )
    assert done.stdout.split("\n")[0] == "closed on 1"

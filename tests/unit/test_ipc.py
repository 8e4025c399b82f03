"""CUDA IPC: tensors sent to other processes, on torch's own allocator and on pyalloc; obstacles are reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dry_support import dry_environment, preloaded, python_for, run_checked

pytestmark = pytest.mark.torch

SHARING = Path(__file__).parent.parent / "programs" / "share_tensors.py"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("install", "env"),
    [(False, {}), (False, EXPANDABLE), (True, {}), (True, {"PYALLOC_CONF": "vmm:false"})],
    ids=["native", "expandable", "pyalloc", "pyalloc vmm:false"],
)
def test_tensors_through_a_queue(install, env) -> None:  # type: ignore[no-untyped-def]
    program = ["-W", "ignore:nvml", str(SHARING), *["--pyalloc"] * install]
    command = [python_for(SHARING.read_text(), env), *program]
    done = run_checked(command, env={**dry_environment(install=install, devices=2), **env})
    assert done.stdout == "shared\n"


def test_nobody_need_inspect_anybody() -> None:
    """What expandable segments need, and many systems refuse."""
    program = ["-W", "ignore:nvml", str(SHARING), "--private"]
    native = {**dry_environment(devices=2), **EXPANDABLE}
    assert "pidfd" in run_checked([sys.executable, *program], env=native, expect=1).stderr
    ours = dry_environment(install=True, devices=2)
    command = [python_for(SHARING.read_text()), *program, "--pyalloc"]
    assert run_checked(command, env=ours).stdout == "shared\n"


def test_the_sender_has_ended(dry_python) -> None:  # type: ignore[no-untyped-def]
    sent = dry_python(
        "import torch; print(torch.arange(9).cuda().untyped_storage()._share_cuda_())",
        install=True,
    )
    dry_python(
        f"""
        import torch
        torch.cuda.init()
        try:
            torch.UntypedStorage._new_shared_cuda(*{sent.stdout.strip()})
        except RuntimeError as error:
            assert "the process that sent it" in str(error) and "has ended" in str(error), error
        else:
            raise AssertionError
        """,
        install=True,
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


def test_pages_that_the_driver_does_not_share(dry_python) -> None:  # type: ignore[no-untyped-def]
    """The error says what to do, and the tensor is unchanged."""
    refused = {"PYALLOC_HOSTCUDA_FAIL": "every:cuMemExportToShareableHandle:801"}
    said = dry_python(SHARE, install=True, env=refused).stdout
    assert "PYALLOC_CONF=vmm:false" in said


def test_what_does_not_help_is_not_advised(dry_python, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A driver without IPC."""
    refusing = preloaded(
        "int cudaIpcGetMemHandle(void *handle, void *base) { return 801; }", tmp_path
    )
    said = dry_python(
        SHARE, install=True, env={"PYALLOC_CONF": "vmm:false", "LD_PRELOAD": refusing}
    ).stdout
    assert "returned 801" in said and "Send a CPU copy" in said and "vmm" not in said


# What a tensor's last owner calls: which device is current, and what its error leaves behind.
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
    """Wherever its last owner is; an error there belongs to nobody else."""
    script = tmp_path / "closing.py"
    script.write_text(CLOSING)
    done = dry_python(
        f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')",
        install=True,
        devices=2,
        env={"PYALLOC_CONF": "vmm:false", "LD_PRELOAD": preloaded(WATCH, tmp_path, devices=2)},
    )
    assert done.stdout.split("\n")[0] == "closed on 1"


def test_other_threads_go_on_while_memory_is_fetched(dry_python) -> None:  # type: ignore[no-untyped-def]
    """From a sender that answers only once one of them has seen to it."""
    dry_python(
        """
        import os, signal, sys, threading, torch
        reader, writer = os.pipe()
        sender = os.fork()
        if sender == 0:
            tensor = torch.arange(9).cuda()
            os.write(writer, repr(tensor.untyped_storage()._share_cuda_()).encode())
            signal.pause()
        handle = eval(os.read(reader, 4096))
        torch.cuda.init()
        begun = threading.Event()
        def wake():
            begun.wait()
            os.kill(sender, signal.SIGCONT)
        threading.Thread(target=wake).start()
        os.kill(sender, signal.SIGSTOP)
        os.waitpid(sender, os.WUNTRACED)
        sys.setswitchinterval(1000)
        begun.set()
        try:
            torch.UntypedStorage._new_shared_cuda(*handle)
        finally:
            os.kill(sender, signal.SIGKILL)
        """,
        install=True,
    )


def test_tensors_of_one_page_are_fetched_once(dry_python) -> None:  # type: ignore[no-untyped-def]
    """So they lie as far apart as at the sender, as those of one segment do on torch's own allocator."""
    dry_python(
        """
        import os, signal, torch
        reader, writer = os.pipe()
        sender = os.fork()
        if sender == 0:
            tensors = [torch.full((999,), float(n)).cuda() for n in range(3)]
            away = tensors[2].data_ptr() - tensors[0].data_ptr()
            handles = [each.untyped_storage()._share_cuda_() for each in tensors]
            os.write(writer, repr((away, handles)).encode())
            signal.pause()
        away, handles = eval(os.read(reader, 4096))
        torch.cuda.init()
        try:
            storages = [torch.UntypedStorage._new_shared_cuda(*each) for each in handles]
            assert storages[2].data_ptr() - storages[0].data_ptr() == away
            del storages[0]
            for n, storage in enumerate(storages, 1):
                tensor = torch.empty(0, device="cuda").set_(storage, 0, (999,))
                assert torch.equal(tensor.cpu(), torch.full((999,), float(n)))
        finally:
            os.kill(sender, signal.SIGKILL)
        """,
        install=True,
    )

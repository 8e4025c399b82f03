"""Tensors for another process by CUDA IPC: share_tensors.py [--pyalloc] [--private].

Parts of a page, whole pages, pages that are not neighbours (on pyalloc), and another device if there is one.  The other
process reads them and writes into them.  Once it has released them, all memory can go back to the device.
--private: the kernel lets no other process inspect this one, as Yama and many containers do.
"""

import ctypes
import gc
import sys

import torch
import torch.multiprocessing as mp

if "--pyalloc" in sys.argv:  # in the other process too, which runs this as well
    import pyalloc

    pyalloc.install()

PR_SET_DUMPABLE, PR_CAPBSET_DROP, CAP_SYS_PTRACE = 4, 24, 19
SIZES = [10, 700, 3 << 20, 15 << 20, 1000]
LAST = len(SIZES) - 1


def device_of(n: int) -> int:
    return 1 if n == LAST and torch.cuda.device_count() > 1 else 0


def be_private() -> None:
    """What processes started from here on may not do either."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0)  # fails for those who do not have it anyway
    assert prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0


def work(inbox: mp.Queue, outbox: mp.Queue) -> None:
    try:
        tensors = inbox.get()
    except RuntimeError as error:
        outbox.put(str(error))
        return
    for n, tensor in enumerate(tensors):
        assert tensor.device.index == device_of(n)
        assert tensor[0].item() == n
        assert tensor[-1].item() == n + 100
        tensor.copy_(torch.full(tensor.shape, float(n + 50)))
    del tensors, tensor
    gc.collect()
    torch.cuda.synchronize()
    outbox.put("written")
    inbox.get()


def main() -> None:
    row = [torch.empty(5 << 20, device="cuda") for _ in range(16)]
    del row[::2]
    sent = [torch.zeros(size) for size in SIZES]
    for n, tensor in enumerate(sent):
        tensor[0], tensor[-1] = n, n + 100
    tensors = [tensor.cuda(device_of(n)) for n, tensor in enumerate(sent)]
    if "--private" in sys.argv:
        be_private()
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=work, args=(inbox, outbox))
    child.start()
    inbox.put(tensors)
    answer = outbox.get(timeout=600)
    if answer != "written":
        sys.exit(answer)
    for n, tensor in enumerate(tensors):
        assert tensor.cpu().eq(n + 50).all()
    del tensors, tensor, row
    gc.collect()  # without a GIL, also what the queue's thread released
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert sum(torch.cuda.memory_reserved(each) for each in range(torch.cuda.device_count())) == 0
    inbox.put(None)
    child.join()
    assert child.exitcode == 0
    print("shared")


if __name__ == "__main__":
    main()

"""CUDA IPC: works for plain allocations; otherwise the error says what to do."""

from __future__ import annotations

import pytest

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


def test_pages_of_the_virtual_memory_calls_cannot_be_shared(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch
        tensor = torch.arange(1000).cuda()
        try:
            tensor.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            assert "PYALLOC_CONF=vmm:false" in str(error), error
        else:
            raise AssertionError
        assert torch.equal(tensor.cpu(), torch.arange(1000))
        """,
        install=True,
    )

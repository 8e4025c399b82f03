"""pyalloc in forks, in workers and spawned children, and in the programs and children of pyalloc run."""

from __future__ import annotations

import os

import pytest

from pyalloc import _bootstrap

pytestmark = pytest.mark.torch


def test_forked_child_installs_nothing_but_may_use_cuda_first(dry_python) -> None:  # type: ignore[no-untyped-def]
    """Fork before the first use: the child has an allocator that works."""
    dry_python(
        """
        import os, torch, pyalloc
        pyalloc.install()
        child = os.fork()
        if child == 0:
            try:
                x = torch.arange(100).cuda()
                os._exit(0 if x.cpu().tolist() == list(range(100)) else 3)
            except BaseException as error:
                print(error, flush=True)
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        torch.empty(1000, device="cuda")
        """
    )


@pytest.mark.parametrize("fast", ["1", "0"])
def test_forked_child_of_a_used_parent_ends_quietly(dry_python, fast: str) -> None:  # type: ignore[no-untyped-def]
    """torch's own way, which is the only one in older versions, ends in another function."""
    done = dry_python(
        """
        import os, sys, torch, pyalloc
        pyalloc.install()
        x = torch.arange(1000).cuda()
        child = os.fork()
        if child == 0:
            del x
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(x.cpu(), torch.arange(1000))
        """,
        env={"PYALLOC_FAST_PATH": fast},
    )
    assert "refused" not in done.stderr


def test_a_child_forked_while_a_thread_takes_a_snapshot(dry_python) -> None:  # type: ignore[no-untyped-def]
    """It waits for no lock of that thread, which it does not have, and does not keep what the thread had changed."""
    dry_python(
        """
        import gc, os, signal, threading, torch
        from pyalloc.inside import sharing, snapshots
        inside, leave = threading.Event(), threading.Event()
        own, loads = torch.cuda.memory._snapshot, torch.__getattr__

        def waits():
            inside.set()
            assert leave.wait(600)
            return {}

        def take():
            with snapshots.uncollected(), sharing._shared.lock:
                snapshots.take()

        sharing.listen(torch)
        torch.cuda.memory._snapshot = waits
        thread = threading.Thread(target=take)
        thread.start()
        assert inside.wait(600)
        child = os.fork()
        if child == 0:
            signal.alarm(600)
            try:
                assert gc.isenabled() and torch.__getattr__ is loads
                assert thread.ident not in sharing._shared.ours  # a new thread may get that number
                torch.cuda.memory._snapshot = own
                torch.cuda.memory._record_memory_history(max_entries=9)
                assert "segments" in snapshots.take()
                os._exit(0)
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled() and thread.ident in sharing._shared.ours
        leave.set()
        thread.join()
        assert gc.isenabled() and torch.__getattr__ is loads and not sharing._shared.ours
        """,
        install=True,
    )


def test_a_child_forked_while_a_thread_installs(run_python) -> None:  # type: ignore[no-untyped-def]
    """It waits for no lock of that thread's, which it has not."""
    run_python(
        """
        import os, signal, sys, threading, pyalloc
        inside, leave = threading.Event(), threading.Event()

        def install():
            with sys.modules["pyalloc.install"]._lock:
                inside.set()
                leave.wait()

        thread = threading.Thread(target=install, daemon=True)
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(600)
            pyalloc.uninstall()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        leave.set()
        thread.join()
        """
    )


def test_data_loader_workers(dry_python, tmp_path) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        pyalloc.install()
        data = torch.utils.data.TensorDataset(torch.arange(64).float())
        loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
        x = torch.ones(3).cuda()
        seen = [batch.cuda().cpu() for (batch,) in loader]
        assert torch.equal(torch.cat(seen), torch.arange(64).float())
        """
    )


def test_spawned_children_install_again(dry_python, tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "spawning.py"
    script.write_text(
        "import torch, pyalloc, torch.multiprocessing as mp\n"
        "def work(rank):\n"
        "    pyalloc.install()\n"
        "    x = torch.arange(100).cuda()\n"
        "    assert x.cpu().tolist() == list(range(100))\n"
        "    assert pyalloc.status().allocations == 1\n"
        "if __name__ == '__main__':\n"
        "    pyalloc.install()\n"
        "    torch.empty(5, device='cuda')\n"
        "    mp.spawn(work)\n"
    )
    dry_python(f"import runpy, torch; runpy.run_path({str(script)!r}, run_name='__main__')")


def test_children_of_pyalloc_run_are_installed(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import subprocess, sys
        import torch, pyalloc
        assert pyalloc.status().installed
        code = "import torch, pyalloc; torch.empty(5, device='cuda'); assert pyalloc.status().allocations == 1"
        subprocess.run([sys.executable, "-c", code], check=True)
        """,
        install=True,
    )


def test_program_of_pyalloc_run_may_install_before_torch_and_choose(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import pyalloc
        pyalloc.install(memory="tight")
        import torch
        torch.empty(5, device="cuda")
        status = pyalloc.status()
        assert status.allocations == 1
        assert ("memory", "tight") in [(o.name, o.value) for o in status.config.options]
        """,
        install=True,
    )
    dry_python(
        """
        import torch, pyalloc
        pyalloc.install(memory="tight")
        torch.empty(5, device="cuda")
        try:
            pyalloc.install(memory="fast")
        except pyalloc.InstallError as error:
            assert "memory: tight, not fast" in str(error), error
        else:
            raise AssertionError
        """,
        install=True,
    )


def test_without_a_device_pyalloc_run_lets_strict_programs_live(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        "import warnings; warnings.simplefilter('error'); import torch; print(torch.zeros(2).sum())",
        env={
            **_bootstrap.environment(dict(os.environ)),
            "PYALLOC_INSTALL": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert "tensor(0.)" in done.stdout
    (told,) = [line for line in done.stderr.splitlines() if "pyalloc" in line]
    assert "no CUDA device" in told and "pyalloc dryrun python" in told

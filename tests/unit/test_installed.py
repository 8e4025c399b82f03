"""After install(): what works then, and what is said about it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


def test_snapshots_tell_the_settings_of_the_installation(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import os, torch, pyalloc
        pyalloc.install(memory="tight")
        os.environ["PYALLOC_CONF"] = "whatever came later"
        settings = torch.cuda.memory._snapshot()["allocator_settings"]["pyalloc"]
        assert settings["memory"] == "tight", settings
        """
    )


def test_a_program_goes_on_after_its_pyalloc_was_removed(dry_python, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """By pip, say: nothing but the modules that are loaded already is there any more."""
    done = dry_python(
        f"""
        import sys, torch, pyalloc

        class Gone:
            def find_spec(name, path, target=None):
                if name.startswith("pyalloc"):
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Gone)
        pyalloc.install()
        table = pyalloc.memory_table()
        with pyalloc.record({str(tmp_path / "out.pya")!r}):
            pyalloc.step()
            with pyalloc.phase("forward"):
                x = torch.nn.Linear(8, 8).cuda()
        pyalloc.set_limit("1GiB")
        try:
            torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            print(error)
        print(table, pyalloc.status(), pyalloc.get_limit(), bool(pyalloc.stats() and pyalloc.snapshot()))
        """
    )
    assert "CUDA out of memory" in done.stdout and "pyalloc is installed (active)" in done.stdout
    assert f"{1 << 30} True" in done.stdout and "forward" in done.stdout
    assert (tmp_path / "out.pya").exists()


def test_oom_and_on_it_goes(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        pyalloc.install()
        keep = torch.arange(1000).cuda()
        for _ in range(5):
            try:
                torch.empty(1 << 40, device="cuda")
            except torch.OutOfMemoryError as error:
                text = str(error)
            else:
                raise AssertionError
        assert "CUDA out of memory. Tried to allocate 4096.00 GiB. GPU 0" in text, text
        assert torch.equal(keep.cpu(), torch.arange(1000))
        assert torch.arange(10).cuda().cpu().tolist() == list(range(10))
        """
    )


def test_limit_setting(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        pyalloc.install(limit="1GiB")
        torch.empty(900 << 20, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(1100 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError
        """
    )


def test_bad_pointers_change_nothing(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        from pyalloc import _core
        pyalloc.install()
        x = torch.arange(1000).cuda()
        before = torch.cuda.memory_stats()
        for bad in (x.data_ptr() + 512, 0xdead000, x.data_ptr() + 1):
            try:
                _core.free(bad)
            except pyalloc.AllocatorError:
                pass
            else:
                raise AssertionError(hex(bad))
        assert torch.cuda.memory_stats() == before
        assert _core.check(0) == 0
        """
    )


def test_pool_context(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import gc, torch, pyalloc
        pyalloc.install()
        torch.empty(1, device="cuda")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with pyalloc.pool() as pool:
            x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
            assert pool.snapshot()
        assert torch.cuda.memory_reserved() > before
        del x, pool
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before
        """
    )


def test_what_status_calls_refused_are_frees(dry_python) -> None:  # type: ignore[no-untyped-def]
    """After out of memory it said "0 refused", which meant frees."""
    done = dry_python(
        """
        import contextlib, torch, pyalloc
        pyalloc.install(limit="2GiB")
        def show():
            lines = pyalloc.status().lines()
            print(*(line for line in lines if line.startswith(("torch made", "refused"))), sep="; ")
        address = torch.cuda.caching_allocator_alloc(512)
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        show()
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                torch.cuda.caching_allocator_delete(address)
        show()
        """
    )
    before, after = (line.partition("torch made ")[2] for line in done.stdout.splitlines()[:2])
    assert before == "1 allocation and 0 frees"
    assert after == "1 allocation and 1 free; refused: 1 free of addresses without a live block"


def test_status_is_readable(dry_python) -> None:  # type: ignore[no-untyped-def]
    done = dry_python("import torch, pyalloc; pyalloc.install(); print(pyalloc.status())")
    assert "pyalloc is installed (active), torch " in done.stdout
    assert "ok  out of memory is raised as: torch.OutOfMemoryError" in done.stdout
    assert "torch made 0 allocations and 0 frees\n" in done.stdout
    assert "replaced: torch._C._cuda_memoryStats," in done.stdout
    assert "without effect" not in done.stdout
    shown = done.stdout
    for older_lacks in ("MemPool(no_split=True)", "observers (slot attachOomRejectionObserver)"):
        shown = shown.replace(f"NO  {older_lacks}", "")
    assert "NO " not in shown


def test_doctor(dry_python) -> None:  # type: ignore[no-untyped-def]
    program = "import sys, torch; from pyalloc.cli import main; sys.exit(main(['doctor']))"
    done = dry_python(program)
    assert "device 0:" in done.stdout
    assert "an allocation of 1 MiB works" in done.stdout
    assert "cudaMalloc" not in done.stdout
    done = dry_python(
        program, install=True, env={"PYALLOC_HOSTCUDA_FAIL": "every:cuMemSetAccess:801"}
    )
    assert "an allocation of 1 MiB works" in done.stdout
    assert "the memory came from cudaMalloc" in done.stdout
    assert [line for line in done.stdout.splitlines()[1:] if len(line) > 80] == []

"""install() that fails or is interrupted, and uninstall(): nothing is half done, and installing again works."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("inside.hooks", "_cuda_functions"),
        ("inside.hooks", "_accelerator_functions"),
        ("install", "_prepare_compiler"),
    ],
)
def test_a_failed_install_changes_nothing(dry_python, owner: str, name: str) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        f"""
        import importlib, torch, pyalloc
        before = dict(vars(torch._C))
        module = importlib.import_module("pyalloc.{owner}")
        original = module.{name}
        def fail(*args):
            raise RuntimeError("what we have never seen")
        module.{name} = fail
        try:
            pyalloc.install()
        except RuntimeError as error:
            assert "never seen" in str(error), error
        else:
            raise AssertionError
        module.{name} = original
        assert not pyalloc._core.is_created() and not pyalloc.status().installed
        assert vars(torch._C) == before
        x = torch.empty(5, device="cuda")
        assert torch.cuda.memory_allocated() == 512  # of torch's own allocator
        assert pyalloc.status().allocations == 0
        """
    )


def test_an_interrupt_leaves_torchs_own_allocator_or_pyalloc(dry_python) -> None:  # type: ignore[no-untyped-def]
    """Ctrl-C after each call that install() and uninstall() make: nothing is half done, and trying again works."""
    dry_python(
        """
        import os, sys, torch, pyalloc
        from pyalloc import _core
        from pyalloc.inside import hooks

        module = sys.modules["pyalloc.install"]
        files = (module.__file__, hooks.__file__)

        def interrupted(call, n):
            def profile(frame, event, _):
                nonlocal n
                caller = {"c_return": frame, "return": frame.f_back}.get(event)
                n -= caller is not None and caller.f_code.co_filename in files
                if n == 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt
            sys.setprofile(profile)
            try:
                call()
            except KeyboardInterrupt:
                return True
            finally:
                sys.setprofile(None)
            return False

        def look():
            backend, nccl = torch.cuda.get_allocator_backend(), os.environ.get("NCCL_GRAPH_REGISTER")
            return dict(vars(torch._C)), backend, nccl, _core.is_created(), pyalloc.status().installed

        native = look()
        pyalloc.install()
        installed = look()
        pyalloc.uninstall()
        assert look() == native
        assert installed[1:] == ("pluggable", "0", True, True), installed[1:]

        n = 1
        while interrupted(pyalloc.install, n):
            now = look()
            assert now[1:] in (native[1:], installed[1:]), (n, now[1:])
            assert len(now[0].items() ^ native[0].items()) in (0, len(installed[0].items() ^ native[0].items())), n
            assert not module._lock._is_owned(), n
            pyalloc.uninstall()
            assert look() == native, n
            n += 1
        assert n > 50 and look()[1:] == installed[1:]

        n = 1
        while interrupted(pyalloc.uninstall, n):
            pyalloc.uninstall()
            assert look() == native, n
            pyalloc.install()
            assert look()[1:] == installed[1:], n
            n += 1
        assert n > 5 and look() == native
        x = torch.empty(5, device="cuda")
        assert torch.cuda.memory_allocated() == 512  # of torch's own allocator
        """
    )


def test_a_torch_with_another_interface_is_told_apart(dry_python) -> None:  # type: ignore[no-untyped-def]
    """With a version that is not out yet: nothing is changed, and the message names the version."""
    dry_python(
        """
        import torch, pyalloc
        memory = torch.cuda.memory

        def tried(name, other):
            original = getattr(memory, name)
            delattr(memory, name)
            if other is not None:
                setattr(memory, name, other)
            try:
                pyalloc.install()
            except pyalloc.InstallError as error:
                assert f"does not know how torch {torch.__version__} accepts other allocators" in str(error), error
                assert str(error.__cause__) in str(error)
            else:
                raise AssertionError
            setattr(memory, name, original)
            assert not pyalloc._core.is_created() and not pyalloc.status().installed

        tried("CUDAPluggableAllocator", None)
        tried("CUDAPluggableAllocator", lambda path, alloc, free, more: None)
        tried("change_current_allocator", None)
        tried("change_current_allocator", lambda allocator, device: None)
        x = torch.empty(5, device="cuda")
        assert torch.cuda.memory_allocated() == 512  # of torch's own allocator
        """
    )


def test_install_after_a_failed_one(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import importlib, torch, pyalloc
        hooks = importlib.import_module("pyalloc.inside.hooks")
        original, hooks.replace_all = hooks.replace_all, None
        try:
            pyalloc.install()
        except TypeError:
            pass
        else:
            raise AssertionError
        hooks.replace_all = original
        pyalloc.install()
        torch.empty(5, device="cuda")
        assert pyalloc.status().allocations == 1
        """
    )


def test_uninstall_before_first_use(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        original = torch._C._cuda_memoryStats
        handle = pyalloc.install()
        assert torch._C._cuda_memoryStats is not original
        detach, pyalloc._core.torch_detach = pyalloc._core.torch_detach, lambda: False
        try:
            handle.uninstall()
        except pyalloc.InstallError as error:
            assert "could not be restored" in str(error), error
        else:
            raise AssertionError
        assert pyalloc.status().installed and torch._C._cuda_memoryStats is not original
        pyalloc._core.torch_detach = detach
        handle.uninstall()
        assert repr(handle) == "<pyalloc not installed: uninstalled>"
        assert torch._C._cuda_memoryStats is original
        x = torch.empty(1000, device="cuda")
        assert torch.cuda.memory_allocated() == 4096
        assert torch.cuda.memory_reserved() == 2 << 20
        assert pyalloc.status().allocations == 0
        """
    )


def test_uninstall_and_install_again(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        first = pyalloc.install(memory="fast")
        works = {what for what, works, _ in pyalloc.status().features if works}
        first.uninstall()
        assert pyalloc.status().config == pyalloc.Config()
        pyalloc.install(memory="tight")
        torch.empty(1000, device="cuda")
        assert pyalloc.status().allocations == 1
        assert {what for what, works, _ in pyalloc.status().features if works} >= works
        with pyalloc.pool() as pool:
            torch.empty(1000, device="cuda")
        assert pool.use_count() == 1
        """
    )


def test_uninstall_after_use_is_refused(dry_python) -> None:  # type: ignore[no-untyped-def]
    """Also in a forked child, where torch says that CUDA is not initialized: it inherits tensors."""
    dry_python(
        """
        import os, torch, pyalloc
        handle = pyalloc.install()
        x = torch.empty(1000, device="cuda")
        for child in (False, True):
            pid = os.fork() if child else 0
            if pid:
                assert os.waitpid(pid, 0)[1] == 0
                break
            assert torch.cuda.is_initialized() != child
            try:
                handle.uninstall()
            except pyalloc.InstallError as error:
                assert "cannot be removed" in str(error)
            else:
                raise AssertionError
            if child:
                os._exit(0)
        assert torch.cuda.memory_allocated() == 4096
        """
    )

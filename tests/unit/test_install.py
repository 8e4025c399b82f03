"""install(): before and after torch, twice, too late, without CUDA; uninstall."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


def test_install_after_torch_is_imported(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        handle = pyalloc.install()
        x = torch.ones(5, device="cpu").cuda()
        assert x.cpu().tolist() == [1.0] * 5
        assert handle.status().installed and handle.status().allocations == 1
        assert repr(handle) == "<pyalloc installed: active>"
        assert torch.cuda.memory_allocated() == 512
        """
    )


def test_a_mistake_in_the_environment_is_the_status_and_no_error(run_python) -> None:  # type: ignore[no-untyped-def]
    """`print(pyalloc.status())` is how a program finds out whether pyalloc is on."""
    done = run_python(
        """
        import contextlib, pyalloc
        print(pyalloc.status())
        with contextlib.suppress(pyalloc.ConfigError):
            pyalloc.install()
        print(pyalloc.status())
        """,
        env={"PYALLOC_CONF": "memory:tigt"},
    )
    first, second = (text for text in " ".join(done.stdout.split()).split("pyalloc is ")[1:])
    assert first.startswith(
        "not installed (install() was not called; PYALLOC_CONF: option 'memory'"
    )
    assert "), torch is not imported settings: " in first
    assert second.startswith(
        "not installed (install() failed: PYALLOC_CONF: option 'memory' cannot"
    )
    assert second.count("tigt") == 1


def test_install_before_torch_is_imported(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import pyalloc
        pyalloc.install()
        import torch
        torch.empty(5, device="cuda")
        assert pyalloc.status().allocations == 1
        """
    )


def test_again_with_the_same_settings(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        pyalloc.install(memory="tight")
        pyalloc.install(memory="tight")
        torch.empty(5, device="cuda")
        pyalloc.install(memory="tight")
        """
    )


def test_again_with_other_settings(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import pyalloc
        pyalloc.install(memory="tight")
        try:
            pyalloc.install(memory="fast")
        except pyalloc.InstallError as error:
            assert "memory: tight, not fast" in str(error), error
        else:
            raise AssertionError
        """
    )


def test_snapshots_tell_the_settings_of_the_installation(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import os, pyalloc, torch
        pyalloc.install(memory="tight")
        os.environ["PYALLOC_CONF"] = "whatever came later"
        settings = torch.cuda.memory._snapshot()["allocator_settings"]["pyalloc"]
        assert settings["memory"] == "tight", settings
        """
    )


def test_what_needs_an_installation_does_not_make_it_too_late(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        limited = pyalloc.pool(limit="1GiB")
        for call in (
            pyalloc.stats, pyalloc.get_limit, pyalloc.trim, lambda: pyalloc.reserve("1GiB"), limited.__enter__
        ):
            try:
                call()
            except pyalloc.AllocatorError as error:
                assert "call pyalloc.install() first" in str(error), error
            else:
                raise AssertionError
        assert not torch.cuda.is_initialized()
        pyalloc.install()
        """
    )


def test_install_after_cuda_was_used_is_refused(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        x = torch.empty(5, device="cuda")
        try:
            pyalloc.install()
        except pyalloc.InstallError as error:
            assert "before the first CUDA call" in str(error) and "pyalloc run" in str(error), error
            assert "notebook" in str(error), error
        else:
            raise AssertionError
        assert not pyalloc.status().installed
        assert torch.cuda.memory_allocated() == 512
        """
    )


def test_status_says_why_install_failed(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        torch.cuda.init()  # nothing is held by then
        for options, why in (({}, "CUDA was already used"), ({"memory": "tigth"}, "cannot be 'tigth'")):
            try:
                pyalloc.install(**options)
            except (pyalloc.InstallError, pyalloc.ConfigError):
                pass
            reason = pyalloc.status().reason
            assert reason.startswith("install() failed: ") and why in reason, reason
            assert "holds" not in reason, reason
        """
    )


@pytest.mark.parametrize(
    ("torch", "why"),
    [
        ("None", "torch is not installed"),
        (
            "types.SimpleNamespace(version=types.SimpleNamespace(cuda=None), __version__='9')",
            "built without CUDA",
        ),
    ],
)
def test_what_to_install_is_said_where_there_is_no_cuda(run_python, torch: str, why: str) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        f"import sys, types, pyalloc; sys.modules['torch'] = {torch}; pyalloc.install()"
    )
    assert f"{why}; install the CUDA build: pip install torch\n" in done.stderr


def test_another_librarys_allocator_is_not_called_use_of_cuda(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        from pyalloc import _core
        pyalloc.install().uninstall()
        memory = torch.cuda.memory
        theirs = memory.CUDAPluggableAllocator(_core.__file__, "pya_torch_alloc", "pya_torch_free")
        memory.change_current_allocator(theirs)
        try:
            pyalloc.install()
        except pyalloc.InstallError as error:
            assert "another allocator" in str(error) and "already used" not in str(error), error
        else:
            raise AssertionError
        assert torch.cuda.get_allocator_backend() == "pluggable"  # theirs, not torch's own
        assert repr(pyalloc.status()) == str(pyalloc.status())
        """
    )


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("hooks", "_cuda_functions"),
        ("hooks", "_accelerator_functions"),
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
        from pyalloc import _core, hooks

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
        hooks = importlib.import_module("pyalloc.hooks")
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


def test_without_cuda_nothing_happens_and_is_said_once(run_python) -> None:  # type: ignore[no-untyped-def]
    run_python(
        """
        import warnings, pyalloc
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            pyalloc.install()
            pyalloc.install()
        ours = [each for each in seen if "pyalloc" in str(each.message)]
        assert [each.filename for each in ours] == ["<string>"], ours  # the program, not pyalloc
        assert "did nothing" in str(ours[0].message), ours
        assert not pyalloc.status().installed
        assert "NO " not in str(pyalloc.status())  # nothing was looked up
        import torch
        assert torch.zeros(3).sum() == 0
        """,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )


def test_unknown_setting(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import pyalloc
        try:
            pyalloc.install(memroy="tight")
        except pyalloc.ConfigError as error:
            assert "memory" in str(error), error
        else:
            raise AssertionError
        pyalloc.install()
        """
    )


@pytest.mark.parametrize(
    ("backend", "newer"),
    [
        ("cudaMallocAsync", "backend:cudaMallocAsync"),
        ("native", "max_split_size_mb:64, backend : native"),  # torch would fail on it later
    ],
)
def test_a_backend_by_name_is_refused(dry_python, backend: str, newer: str) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        f"""
        import pyalloc
        try:
            pyalloc.install()
        except pyalloc.InstallError as error:
            assert "backend:{backend}" in str(error) and "Remove" in str(error), error
        else:
            raise AssertionError
        """,
        env={
            "PYTORCH_ALLOC_CONF": newer,
            "PYTORCH_CUDA_ALLOC_CONF": f"backend:{backend}",
        },
    )


def test_torchs_own_settings_that_have_no_effect_are_named(dry_python) -> None:  # type: ignore[no-untyped-def]
    text = (
        "expandable_segments:True,garbage_collection_threshold:0.8,pinned_num_register_threads:2,"
        "roundup_power2_divisions:[256:1,512:2,>:4]"
    )
    done = dry_python(
        "import pyalloc; pyalloc.install(); print(*pyalloc.status().lines(), sep='\\n')",
        env={"PYTORCH_ALLOC_CONF": text, "PYTORCH_CUDA_ALLOC_CONF": text},
    )
    told = [line for line in done.stdout.splitlines() if "without effect" in line]
    assert told and all(
        "expandable_segments" in line and "garbage_collection_threshold" in line for line in told
    )
    assert "pinned" not in "".join(told)
    # What pyalloc could do as well is said at once, with how to ask for it.
    assert "PYALLOC_CONF=garbage_collection_threshold:0.8" in done.stderr
    assert "PYALLOC_CONF=roundup_power2_divisions:... (" in done.stderr
    assert "expandable_segments" not in done.stderr


def test_nccl_registers_no_pages_in_graphs(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import ctypes, os, pyalloc
        name = "NCCL_GRAPH_REGISTER"
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        for theirs, options, seen in ((None, {}, b"0"), ("1", {}, b"1"), (None, {"vmm": False}, None)):
            os.environ.pop(name, None)
            if theirs is not None:
                os.environ[name] = theirs
            pyalloc.install(**options)
            assert getenv(name.encode()) == seen, (theirs, options, getenv(name.encode()))
            assert (name in str(pyalloc.status())) == (seen == b"0")
            pyalloc.uninstall()
            assert os.environ.get(name) == theirs
        pyalloc.install()
        os.environ[name] = "1"
        assert name not in str(pyalloc.status())
        pyalloc.uninstall()
        assert os.environ.pop(name) == "1"  # the program's own
        os.environ[name] = "0"  # as a child inherits it
        pyalloc.install()
        assert name in str(pyalloc.status())
        pyalloc.uninstall()
        assert os.environ[name] == "0"
        """
    )


def test_uninstall_before_first_use(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        original = torch._C._cuda_memoryStats
        handle = pyalloc.install()
        assert torch._C._cuda_memoryStats is not original
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


def test_threads_that_install_at_once(dry_python) -> None:  # type: ignore[no-untyped-def]
    done = dry_python(
        """
        import sys, threading
        import pyalloc, torch

        sys.setswitchinterval(1e-6)
        together = threading.Barrier(8)
        failed = []

        def install():
            together.wait()
            try:
                pyalloc.install()
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=install) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        x = torch.empty(1000, device="cuda")
        assert torch.cuda.memory_allocated() == 4096
        """
    )
    assert done.returncode == 0


def test_uninstall_after_use_is_refused(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
        handle = pyalloc.install()
        x = torch.empty(1000, device="cuda")
        try:
            handle.uninstall()
        except pyalloc.InstallError as error:
            assert "cannot be removed" in str(error)
        else:
            raise AssertionError
        assert torch.cuda.memory_allocated() == 4096
        """
    )


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


def test_finders_of_modules_that_python_passes_over_do_no_harm(run_python) -> None:  # type: ignore[no-untyped-def]
    """Old ones have only find_module()."""
    done = run_python(
        """
        import sys, warnings
        warnings.simplefilter("ignore")
        class Old:
            def find_module(self, name, path=None):
                return None
        sys.meta_path.insert(0, Old())
        from pyalloc._bootstrap.importing import after_import
        for wanted in (print, print):
            after_import("colorsys", lambda module: wanted(module.__name__))
        import colorsys
        after_import("colorsys", lambda module: print("later", module is colorsys))
        """
    )
    assert done.stdout.split() == ["colorsys", "colorsys", "later", "True"]


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


def test_status_is_readable(dry_python) -> None:  # type: ignore[no-untyped-def]
    done = dry_python("import pyalloc; pyalloc.install(); print(pyalloc.status())")
    assert "pyalloc is installed (active), torch " in done.stdout
    assert "ok  out of memory is raised as: torch.OutOfMemoryError" in done.stdout
    assert "torch made 0 allocations and 0 frees, 0 refused" in done.stdout
    assert "replaced: torch._C._cuda_memoryStats," in done.stdout
    assert "without effect" not in done.stdout
    shown = done.stdout
    for older_lacks in ("MemPool(no_split=True)", "observers (slot attachOomRejectionObserver)"):
        shown = shown.replace(f"NO  {older_lacks}", "")
    assert "NO " not in shown


def test_doctor(dry_python) -> None:  # type: ignore[no-untyped-def]
    done = dry_python("import sys; from pyalloc.cli import main; sys.exit(main(['doctor']))")
    assert "device 0:" in done.stdout
    assert "an allocation of 1 MiB works" in done.stdout
    assert "cudaMalloc" not in done.stdout
    done = dry_python(
        "import sys; from pyalloc.cli import main; sys.exit(main(['doctor']))",
        install=True,
        env={"PYALLOC_HOSTCUDA_FAIL": "every:cuMemSetAccess:801"},
    )
    assert "an allocation of 1 MiB works" in done.stdout
    assert "the memory came from cudaMalloc" in done.stdout
    assert [line for line in done.stdout.splitlines()[1:] if len(line) > 80] == []

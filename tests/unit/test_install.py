"""install(): before and after torch, twice, at once, too late, without CUDA, with settings of others."""

from __future__ import annotations

import sys

import pytest

import pyalloc

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
        import torch, pyalloc
        pyalloc.install(memory="tight")
        try:
            pyalloc.install(memory="fast")
        except pyalloc.InstallError as error:
            assert "memory: tight, not fast" in str(error), error
        else:
            raise AssertionError
        assert pyalloc.status().reason == "active"
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


def test_without_cuda_nothing_happens_and_is_said_once(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import os, torch, warnings, pyalloc
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            pyalloc.install()
            pyalloc.install()
        ours = [each for each in seen if "pyalloc" in str(each.message)]
        assert [each.filename for each in ours] == ["<string>"], ours  # the program, not pyalloc
        assert "did nothing" in str(ours[0].message), ours
        assert not pyalloc.status().installed
        assert "NO " not in str(pyalloc.status())  # nothing was looked up
        assert torch.zeros(3).sum() == 0
        """
    )


def test_unknown_setting(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc
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
        import os, torch, pyalloc
        for older, newer in (("", "{newer}"), ("backend:{backend}", "")):
            os.environ.update(PYTORCH_ALLOC_CONF=newer, PYTORCH_CUDA_ALLOC_CONF=older)
            try:
                pyalloc.install()
            except pyalloc.InstallError as error:
                assert "backend:{backend}" in str(error) and "Remove" in str(error), error
            else:
                raise AssertionError
        """
    )


def test_torchs_own_settings_that_have_no_effect_are_named(dry_python) -> None:  # type: ignore[no-untyped-def]
    text = (
        "expandable_segments:True,garbage_collection_threshold:0.8,pinned_num_register_threads:2,"
        "roundup_power2_divisions:[256:1,512:2,>:4]"
    )
    done = dry_python(
        f"""
        import os, torch, pyalloc
        os.environ.update(PYTORCH_ALLOC_CONF={text!r}, PYTORCH_CUDA_ALLOC_CONF={text!r})
        pyalloc.install()
        print(*pyalloc.status().lines(), sep="\\n")
        """
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


def test_torchs_settings_that_pyalloc_has_too_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both variables may name one; what is set for pyalloc as well needs no word."""
    module = sys.modules[pyalloc.install.__module__]
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(
            name, "garbage_collection_threshold:0.8,roundup_power2_divisions:4,max_split_size_mb:64"
        )
    for text, told in (
        ("", ["garbage_collection_threshold:0.8", "roundup_power2_divisions:4"]),
        ("garbage_collection_threshold:0.5", ["roundup_power2_divisions:4"]),
    ):
        caplog.clear()
        module._tell_of_settings(pyalloc.Config(text))
        found = [record.message.rpartition("PYALLOC_CONF=")[2] for record in caplog.records]
        assert sorted(found) == told


def test_nccl_registers_no_pages_in_graphs(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import ctypes, os, torch, pyalloc
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


def test_threads_that_install_at_once(dry_python) -> None:  # type: ignore[no-untyped-def]
    done = dry_python(
        """
        import sys, threading
        import torch, pyalloc

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

"""pyalloc dryrun: what it runs, passes through and says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyalloc import _bootstrap, trace
from pyalloc.inside import autorecord
from pyalloc.outside import hostcuda

from .dryrun_support import ROOT, finish, flat, program, start

ALLOCATORS = ["native", "expandable", "pyalloc"]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_summary_tells_peaks_even_when_the_program_resets_them(
    torch_found: hostcuda.Torch, tmp_path: Path, allocator: str
) -> None:
    by = "cuda" if allocator == "native" else "accelerator"
    source = f"""
        import sys, torch
        assert sys.argv[1:] == ["--flag", "a b"]
        big = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
        del big
        getattr(torch.{by}, "reset_peak_memory_stats", torch.cuda.reset_peak_memory_stats)()
        torch.ones(3, device="cuda").cpu()
        print("backend", torch.cuda.get_allocator_backend())
    """
    arguments = ["--memory", "2GB", "--allocator", allocator, "--json", "figures.json"]
    command = [sys.executable, program(tmp_path, source), "--flag", "a b"]
    code, out, err = finish(start([*arguments, *command], tmp_path))
    assert code == 0, err
    assert ("pluggable" in out) == (allocator == "pyalloc")
    assert "fits 2.00 GiB" in err
    assert "read 12 bytes back" in err
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["peak_allocated_bytes"] == 600 << 20
    assert figures["peak_device_bytes"] == figures["peak_reserved_bytes"] >= 600 << 20
    assert figures["fits"] is True
    assert figures["missing"] == []
    assert 0 < figures["memory_calls"] < figures["device_calls"]
    code, _, err = finish(start([*arguments, *command], tmp_path))
    assert code == 2
    assert "--force" in err


def test_managed_memory_is_told_apart(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Paged optimizers keep their state in it; it may exceed the device, so it is no part of what must fit."""
    source = """
        import ctypes, torch
        torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        cuda = ctypes.CDLL(None)
        def take(size):
            pointer = ctypes.c_void_p()
            assert cuda.cudaMallocManaged(ctypes.byref(pointer), ctypes.c_size_t(size), 1) == 0
            return pointer
        assert cuda.cudaFree(take(300 << 20)) == 0
        kept = take(500 << 20), take(100)
    """
    arguments = ["--memory", "256MB", "--json", "figures.json"]
    code, _, err = finish(start([*arguments, sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0, err
    assert "fits 256.0 MiB" in err and "note: 500.0 MiB of managed memory" in flat(err)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["devices"][0]["peak_managed_bytes"] == (500 << 20) + 100
    assert figures["peak_device_bytes"] < 32 << 20


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_out_of_memory_is_the_verdict_and_the_exit_code_the_programs(
    torch_found: hostcuda.Torch, tmp_path: Path, allocator: str
) -> None:
    source = "import torch; torch.empty(600 << 20, dtype=torch.uint8, device='cuda')"
    arguments = ["--memory", "500MiB", "--allocator", allocator, "--record", "out.pya"]
    code, _, err = finish(start([*arguments, sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in err
    assert "does not fit 500.0 MiB" in err
    # No other allocator could serve that: the advice is more memory.
    assert "with nothing wasted it needed 600.0 MiB" in flat(err)
    assert f"next: pyalloc dryrun --memory 1000MiB --allocator {allocator} " in err
    assert "recorded: pyalloc report out.pya" in err  # also the only request was refused


def test_a_python_that_pyalloc_cannot_get_into_is_told_why_torchs_figures_are_missing(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    source = "import torch; torch.empty(600 << 20, dtype=torch.uint8, device='cuda')"
    code, _, err = finish(start([sys.executable, "-I", program(tmp_path, source)], tmp_path))
    assert code == 0
    assert "peak reserved unknown" in flat(err) and "600.0 MiB at most" in err
    assert "-I` ignores PYTHONPATH or sitecustomize" in flat(err)
    assert "first: leave out that option\n  next: pyalloc dryrun --memory 80GB --alloc" in err
    assert "--allocator native" in err  # another one, which is refused, would leave nothing known


def test_out_of_memory_that_became_another_error_is_told(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    source = """
        import torch
        try:
            torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise ValueError("no room for the cache") from error
    """
    command = [sys.executable, program(tmp_path, source)]
    code, _, err = finish(start(["--memory", "500MiB", *command], tmp_path))
    assert code == 1
    assert "does not fit 500.0 MiB: the program died of torch.OutOfMemoryError" in flat(err)


@pytest.mark.parametrize(
    "limit",
    [
        "torch.cuda.set_per_process_memory_fraction(0.1)",
        'pool = pyalloc.pool(limit="512MiB"); pool.__enter__()',
    ],
    ids=["a device's", "a pool's"],
)
def test_out_of_memory_of_a_limit_asks_for_no_larger_device(
    torch_found: hostcuda.Torch, tmp_path: Path, limit: str
) -> None:
    source = f"""
        import torch, pyalloc
        {limit}
        torch.empty(900 << 20, dtype=torch.uint8, device="cuda")
    """
    arguments = ["--memory", "2GB", "--allocator", "pyalloc"]
    code, _, err = finish(start([*arguments, sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 1
    assert "does not fit the limit that was set" in err
    assert "first: raise or remove the limit\n  next: pyalloc dryrun --memory 2GB" in err


def test_out_of_addresses_asks_for_no_larger_device(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    source = """
        import resource, torch
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), -1))
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    """
    arguments = ["--memory", "2GB", "--allocator", "pyalloc"]
    code, _, err = finish(start([*arguments, sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 1 and "no address space left" in err, err
    assert "first: lift the limit: ulimit -v unlimited\n  next: pyalloc dryrun --memory 2GB" in err


def test_exit_codes_and_errors_pass_through(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    source = "import torch; torch.randn(1).cuda().exp().item(); raise SystemExit(37)"
    code, _, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 37
    assert "ended with exit code 37" in err
    assert (
        "in 1 copy; no kernel ran, so sizes and errors that depend on these values are wrong"
        in flat(err)
    )


def test_ctrl_c_reaches_the_program_and_the_summary_still_comes(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    source = """
        import sys, time, torch
        torch.ones(1).cuda()
        try:
            print("ready", flush=True)
            time.sleep(800)
        except KeyboardInterrupt:
            sys.exit(9)
    """
    process = start([sys.executable, program(tmp_path, source)], tmp_path, cold=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 9
    assert "pyalloc dryrun: PyTorch" in err


def test_a_killed_program_gives_the_shells_exit_code(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    source = "import os, signal, torch; torch.ones(9).cuda(); os.kill(os.getpid(), signal.SIGKILL)"
    code, _, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 128 + signal.SIGKILL
    assert "unknown: the program was ended by SIGKILL" in err
    assert "figures          none" in err and " 0 bytes" not in err


def test_an_unhandled_ctrl_c_loses_no_figures(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    source = (
        "import os, signal, torch; torch.ones(1 << 20).cuda(); os.kill(os.getpid(), signal.SIGINT)"
    )
    code, _, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 128 + signal.SIGINT
    assert "peak allocated   4.0 MiB" in err
    assert "fits 80.00 GiB so far: the program was ended by SIGINT" in err


def test_processes_that_end_without_ceremony_are_counted_and_recorded(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    source = """
        import multiprocessing, os, torch
        def work():
            torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        x = torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
        os._exit(7 if child.exitcode else 0)
    """
    (tmp_path / "out.1.pya").write_bytes(b"somebody's own")
    arguments = ["--record", "out.pya", "--allocator", "pyalloc", "--json", "figures.json"]
    command = [sys.executable, program(tmp_path, source)]
    code, _, err = finish(start([*arguments, *command], tmp_path))
    assert code == 0, err
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert sorted(use["peak_allocated_bytes"] for use in figures["devices"]) == [
        10 << 20,
        100 << 20,
    ]
    assert figures["untold"] == []
    assert list(tmp_path.glob("*.part")) == []
    traces = sorted(set(tmp_path.glob("out*.pya")) - {tmp_path / "out.1.pya"})
    assert [trace.analyse(path).totals["peak_bytes"] >> 20 for path in traces] == [10, 100]
    assert f"recorded: pyalloc report {' '.join(path.name for path in traces)}" in err
    # Nothing of it is overwritten, and --force takes only what surely belongs to an earlier recording.
    (tmp_path / "out.pya").rename(tmp_path / "out.pya.part")
    assert finish(start(["--record", "out.pya", *command], tmp_path))[0] == 2
    autorecord.remove_earlier(tmp_path / "out.pya")
    assert (tmp_path / "out.1.pya").exists()
    assert not (tmp_path / "out.pya.part").exists()


def test_what_another_command_recorded_to_the_same_name_is_not_the_programs(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Two that are started at once find no file yet.  Both were named, as if they were of one program."""
    source = """
        import json, os, subprocess, sys, torch
        if len(sys.argv) > 1:
            subprocess.run(sys.argv[1:], env=json.loads(os.environ["OUTSIDE"]), check=True)
        torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
    """
    name = program(tmp_path, source)
    words = ["--record", "out.pya", sys.executable, name]
    other = [sys.executable, "-m", "pyalloc", "dryrun", *words]
    outside = {**os.environ, "PYTHONPATH": str(ROOT)}
    code, _, err = finish(start([*words, *other], tmp_path, OUTSIDE=json.dumps(outside)))
    assert code == 0, err
    (own,) = set(tmp_path.glob("out*.pya")) - {tmp_path / "out.pya"}
    first, second = [line for line in err.splitlines() if "recorded" in line and "report" in line]
    assert first == "  recorded: pyalloc report out.pya"
    assert second == f"  recorded: pyalloc report {own.name}"
    assert err.splitlines()[-1] == "  another command recorded to out.pya"


def test_a_process_that_only_looks_at_the_device_leaves_no_recording(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    source = """
        import subprocess, sys, torch
        x = torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
        look = "import torch; torch.cuda.init(); torch.cuda.get_device_properties(0)"
        subprocess.run([sys.executable, "-c", look], check=True)
    """
    command = [sys.executable, program(tmp_path, source)]
    code, _, err = finish(start(["--record", "out.pya", *command], tmp_path))
    assert code == 0, err
    assert [path.name for path in tmp_path.glob("out*")] == ["out.pya"]
    assert "recorded: pyalloc report out.pya\n" in err


@pytest.mark.parametrize("given", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_on_beside_other_settings(
    torch_found: hostcuda.Torch, tmp_path: Path, given: str
) -> None:
    """Under either name: torch knows one or both, and which one wins has changed."""
    source = """
        import torch
        x = torch.empty(1, device="cuda")
        print(torch.cuda.memory_snapshot()[0]["is_expandable"])
    """
    command = ["--allocator", "expandable", sys.executable, program(tmp_path, source)]
    settings = {given: "garbage_collection_threshold:0.5"}
    code, out, err = finish(start(command, tmp_path, **settings))
    assert (code, out) == (0, "True\n"), err


def test_the_programs_own_sitecustomize_still_runs(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.own_ran = __name__\n")
    script = program(tmp_path, "import builtins; print(builtins.own_ran)")
    path = os.pathsep.join([str(own), str(ROOT)])
    code, out, err = finish(start([sys.executable, script], tmp_path, PYTHONPATH=path))
    assert (code, out) == (0, "sitecustomize\n"), err


def test_only_the_bootstrap_folder_is_put_before_the_programs_path(tmp_path: Path) -> None:
    env = _bootstrap.environment({"PYTHONPATH": "/a:/b", "OTHER": "1"})
    folder, *rest = env["PYTHONPATH"].split(os.pathsep)
    assert rest == ["/a", "/b"]
    assert (Path(folder) / "sitecustomize.py").exists()
    assert env["OTHER"] == "1"
    # -S leaves out site-packages, so that only the bootstrap can find pyalloc.
    source = (
        "import importlib.util, os, sitecustomize, subprocess, sys, pyalloc; print(pyalloc.__file__)\n"
        "assert importlib.util.find_spec('report') is None, 'hides what the program calls so'\n"
        "assert importlib.util.find_spec('examples') is None, 'lies beside pyalloc'\n"
        "assert importlib.util.find_spec('pyalloc.errors') and pyalloc.status()\n"
        "env = {'PYTHONPATH': os.pathsep.join(sys.path)}\n"  # as torch makes it for children
        "subprocess.run([sys.executable, '-S', '-c', 'import sitecustomize'], env=env, check=True)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", source],
        cwd=tmp_path,
        env={"PYTHONPATH": folder, _bootstrap.REPORT: str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "pyalloc" / "__init__.py"


@pytest.mark.parametrize("keeps", ["", ":$PYTHONPATH"])
def test_a_program_that_replaces_pythonpath_is_told_so(
    torch_found: hostcuda.Torch, tmp_path: Path, keeps: str
) -> None:
    """Nothing said why torch's figures were missing."""
    takes = "import ctypes; ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), 1 << 20)"
    script = f"PYTHONPATH=/a{keeps} exec {sys.executable} -c '{takes}'"
    arguments = ["--allocator", "pyalloc", "--record", "out.pya", "sh", "-c", script]
    code, _, err = finish(start(arguments, tmp_path))
    assert all(len(line) <= 80 for line in err.splitlines() if "next: " not in line)
    told = flat(err)
    assert "recorded: nothing; no process used CUDA through torch, or the program repl" in told
    assert code == 0 and "are missing" in told and "may not have run on pyalloc" in told
    assert ("are missing: the program replaced PYTHONPATH" in told) != bool(keeps)
    assert (
        "first: let PYTHONPATH keep what it had: PYTHONPATH=folder:$PYTHONPATH" in told
    ) != bool(keeps)


def test_an_allocator_that_the_program_chose_is_not_called_native(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    source = """
        import torch, pyalloc
        pyalloc.install()
        x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        y = torch.empty(1000, dtype=torch.uint8, device="cuda")
        raise SystemExit(5)
    """
    code, _, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 5
    assert "the program's own allocator" in err and "native allocator" not in err
    assert "peak allocated   3.0 MiB\n" in err
    # Run again as it is, without a GPU.
    assert "next: pyalloc dryrun --memory 80GB --allocator native " in err


def test_the_drivers_allocator_is_not_called_native(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    source = "import torch; torch.empty(3 << 20, dtype=torch.uint8, device='cuda')"
    command = [sys.executable, program(tmp_path, source)]
    chosen = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    code, _, err = finish(start(command, tmp_path, **chosen))
    assert code == 0
    assert "the program's own allocator" in err and "native allocator" not in err
    assert "--allocator pyalloc" not in err  # would be refused beside that setting


def test_what_is_rounding_is_told_apart(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """torch's allocator counts a whole block if less than 1 MiB of it would be left."""
    source = "import torch; torch.empty((20 << 20) - 700_000, dtype=torch.uint8, device='cuda')"
    code, _, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0
    assert "peak allocated   20.0 MiB (19.3 MiB requested, the rest is rounding)" in err


def test_kernels_that_are_in_python_are_no_place_of_the_program(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Autocast's conversions and sums, also on autograd's threads, which run no line of the program."""
    source = """
        import torch

        torch.cuda.memory._record_memory_history()
        model = torch.nn.Linear(1024, 1024).cuda()
        half = torch.ones(64 << 20, device="cuda").half()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.ones(512, 1024, device="cuda")).square().sum()
        loss.backward()
        try:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            print(error)
    """
    arguments = ["--memory", "1GB", "--allocator", "pyalloc", "--record", "out.pya"]
    code, out, err = finish(start([*arguments, program(tmp_path, source)], tmp_path))
    assert code == 0, err
    assert "Held: 128.00 MiB in 1 block by program.py:6 in <module>; " in out
    assert "following.py" not in out and "_ops.py" not in out
    found = trace.analyse(tmp_path / "out.pya")
    end = found.moments[max(found.moments)]
    labels = {name for moment in (found.peak, end) for name in found.labels(moment.blocks)}
    assert any("program.py:6 " in name for name in labels), labels
    assert any("backward" in name or "gradient of" in name for name in labels), labels
    assert not any("_bootstrap" in name or "torch/_ops.py" in name for name in labels), labels


def test_what_was_tuned_without_a_card_is_not_for_a_card(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Triton keeps timings; those of kernels that computed nothing were used by a later training on the card."""
    pytest.importorskip("triton", reason="torch's CUDA builds bring it")
    source = """
        import torch, triton, triton.language as tl
        @triton.autotune([triton.Config({"N": n}) for n in (64, 128)], key=["n"], cache_results=True)
        @triton.jit
        def double(x, n, N: tl.constexpr):
            at = tl.program_id(0) * N + tl.arange(0, N)
            tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)
        x = torch.randn(1000, device="cuda")
        double[lambda meta: (triton.cdiv(1000, meta["N"]),)](x, 1000)
    """
    usual, own = tmp_path / "usual", tmp_path / "usual" / hostcuda.CACHE
    command = [sys.executable, program(tmp_path, source)]
    code, _, err = finish(start(command, tmp_path, TRITON_CACHE_DIR=str(usual)))
    assert code == 0, err
    assert list(own.glob("*/double.autotune.json")) and list(usual.iterdir()) == [own]


def test_each_cache_of_compiled_kernels_is_kept_apart_once(torch_found: hostcuda.Torch) -> None:
    """Wherever the user has it; a program in a dry run may start another."""
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    for given, ends in (
        ({"HOME": "/home/a"}, ("/home/a/.triton/cache", "/torchinductor_")),
        ({"HOME": "/home/a", "TRITON_HOME": "/b"}, ("/b/.triton/cache", "/torchinductor_")),
        (dict.fromkeys(names, "/c"), ("/c", "/c")),
    ):
        once = hostcuda.environment(given, torch_found)
        again = hostcuda.environment(once, torch_found)
        for name, end in zip(names, ends, strict=True):
            assert end in once[name] and once[name].count(hostcuda.CACHE) == 1
            assert once[name].endswith(f"/{hostcuda.CACHE}") and again[name] == once[name]


@pytest.mark.torch
@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_killed_is_not_said_to_have_used_nothing(tmp_path: Path, is_known: bool) -> None:
    """`with Pool() as pool:` ends its processes with SIGTERM; one that ends by itself is told apart."""
    code, _, err = finish(
        start(
            [
                sys.executable,
                program(
                    tmp_path,
                    f"""
                    import multiprocessing, os, signal
                    def use(is_killed):
                        import torch
                        kept = torch.empty(1 << 20, device="cuda")
                        if is_killed:
                            os.kill(os.getpid(), signal.SIGKILL)
                    if __name__ == "__main__":
                        for is_killed in (True, False)[: 1 + {is_known}]:
                            child = multiprocessing.Process(target=use, args=(is_killed,))
                            child.start()
                            child.join()
                    """,
                ),
            ],
            tmp_path,
        )
    )
    assert code == 0, err
    told = flat(err)
    assert "warning: figures of process" in told and "are missing: killed, for example" in told
    assert "used no device memory" not in told and "did not call CUDA" not in told
    assert ("verdict fits 80.00 GiB" in told) == is_known
    assert ("verdict unknown: the process that used the device was killed" in told) != is_known


@pytest.mark.torch
def test_what_still_runs_is_not_said_to_be_killed(tmp_path: Path) -> None:
    """A server that the program leaves behind."""
    left = tmp_path / "left.py"
    left.write_text("""
import os, pathlib, time, torch
kept = torch.empty(1 << 20, device="cuda")
pathlib.Path("used").touch()
for _ in range(3000):
    if os.path.exists("end"):
        break
    time.sleep(0.1)
""")
    source = f"""
    import pathlib, subprocess, sys, time
    child = subprocess.Popen(
        [sys.executable, {str(left)!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not pathlib.Path("used").exists():
        assert child.poll() is None
        time.sleep(0.1)
    pathlib.Path("pid").write_text(str(child.pid))
    """
    code, _, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    (tmp_path / "end").touch()
    assert code == 0, err
    told = flat(err)
    pid = (tmp_path / "pid").read_text()
    assert f"warning: figures of process {pid} are missing: still running" in told
    assert "verdict unknown: the process that used the device is still running" in told
    assert "killed" not in told

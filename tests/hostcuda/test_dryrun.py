"""pyalloc dryrun: what it runs, passes through and says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dry_support import PATIENCE_S

from pyalloc import _bootstrap, dryrun, elf, hostcuda, recording, trace
from pyalloc.errors import UsageError

ROOT = Path(__file__).parent.parent.parent


def start(arguments: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.Popen(
        # Tests run in the background inherit an ignored Ctrl-C: env undoes that.
        ["env", "--default-signal=INT", sys.executable, "-m", "pyalloc", "dryrun", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # no terminal: a signal reaches the parent alone
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the children too
        raise
    return process.returncode, out, err


def program(folder: Path, source: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GB", 24 << 30),
        ("512MiB", 512 << 20),
        ("1.5g", 3 << 29),
        ("100", 100),
        (" 2 tb ", 2 << 40),
    ],
)
def test_sizes_are_read_as_a_card_names_them(text: str, expected: int) -> None:
    assert dryrun.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "12XB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        dryrun.parse_bytes(text)


def result(memory: int, **changed: Any) -> dryrun.Result:
    """Of a program whose two processes peak at half of that and a bit on one device."""
    peak = memory // 2 + 500
    use = dryrun.DeviceUse(1, 0, 0, memory, peak, None, None, None)
    known: dict[str, Any] = {
        "command": ("python", "train.py"), "allocator": "native", "torch": "2.15.0", "exit_code": 0,
        "fits": True, "ooms": 0, "error": "", "limited": False, "memory": memory, "n_devices": 1,
        "devices": (use, replace(use, pid=2)), "peak_requested_bytes": None, "peak_allocated_bytes": None,
        "peak_reserved_bytes": None, "peak_device_bytes": peak, "memory_calls": 1, "device_calls": 1,
        "launches": 1, "dtoh_copies": 0, "dtoh_bytes": 0, "missing": (),
    }  # fmt: skip
    return dryrun.Result(**{**known, **changed})


def flat(text: str) -> str:
    """A summary as if the terminal had one endless line."""
    return " ".join(text.split())


def test_summary_fits_80_columns() -> None:
    """All but the next command, which is copied as it is."""
    died = {"exit_code": 1, "error": "OutOfMemoryError", "limited": True}
    for changed in (
        {},
        {"ooms": 12},
        {"exit_code": 7},
        {"exit_code": 137, "device_calls": 0},
        died,
    ):
        wide = {
            "devices": tuple(
                dryrun.DeviceUse(
                    2**22 + n, 15, 15, 8 << 30, 5 << 30, 5 << 30, (5 << 30) - 999, 5 << 30
                )
                for n in range(2)
            ),
            "dtoh_copies": 12_345,
            "dtoh_bytes": 123_456,
            "device_calls": 987_654_321,
            "memory_calls": 12_345_678,
            "launches": 12_345_678,
            "peak_allocated_bytes": 1023 << 20,
            "peak_requested_bytes": 1021 << 20,
            "untold": tuple(range(2**22, 2**22 + 9)),
            "torch": "2.15.0+cu132",
            "allocator": "expandable",
        }
        text = dryrun.summary(result(8 << 30, **{**wide, **changed}))
        *lines, last = text.splitlines()
        assert last.startswith("  next: ")
        assert [line for line in lines if len(line) > 80] == []
        assert text.count("process 4194304 device 15: allocated 5.00 GiB") == 1


def test_two_sizes_that_are_compared_read_differently() -> None:
    text = flat(dryrun.summary(result(8 << 30)))
    assert "each with 8,589,934,592 bytes of its own here" in text
    assert "they need up to 8,589,935,592 bytes together" in text
    assert "next: pyalloc dryrun --memory 8GB " in text
    assert "each with 700,000 bytes" in flat(dryrun.summary(result(700_000)))
    assert "next: pyalloc dryrun --memory 700000 " in dryrun.summary(result(700_000))


def test_what_is_less_than_was_asked_for_is_no_rounding() -> None:
    """A freed block that another stream still uses is asked for, not allocated."""
    told = {"peak_allocated_bytes": 30 << 20, "peak_requested_bytes": 64 << 20}
    assert "rounding" not in dryrun.summary(result(1 << 30, **told))
    told["peak_allocated_bytes"] = 66 << 20
    text = dryrun.summary(result(1 << 30, **told))
    assert "66.0 MiB (64.0 MiB asked for, the rest is rounding)" in text


def test_elf_reader_agrees_with_what_the_libraries_are_for(libraries: Path) -> None:
    runtime = elf.read(libraries / "libcudart.so.13")
    assert "libcuda.so.1" in runtime.needed
    assert {"cudaMalloc", "__cudaRegisterFatBinary"} <= runtime.defined - runtime.weak
    assert "cudaGraphicsMapResources" in runtime.weak
    assert "pya_hc_memory_alloc" in runtime.undefined
    with pytest.raises(elf.ElfError, match=r"test_dryrun\.py"):
        elf.read(Path(__file__))


ALLOCATORS = ["native", "expandable", "pyalloc"]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_summary_tells_peaks_even_when_the_program_resets_them(
    torch_found: hostcuda.Torch, tmp_path: Path, allocator: str
) -> None:
    source = """
        import sys, torch
        assert sys.argv[1:] == ["--flag", "a b"]
        big = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
        del big
        torch.cuda.reset_peak_memory_stats()
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


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_out_of_memory_is_the_verdict_and_the_exit_code_the_programs(
    torch_found: hostcuda.Torch, tmp_path: Path, allocator: str
) -> None:
    source = "import torch; torch.empty(600 << 20, dtype=torch.uint8, device='cuda')"
    arguments = ["--memory", "500MiB", "--allocator", allocator]
    code, _, err = finish(start([*arguments, sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in err
    assert "does not fit 500.0 MiB" in err
    assert "next: pyalloc dryrun --memory" in err


def test_out_of_memory_of_a_limit_asks_for_no_larger_device(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    source = """
        import torch
        torch.cuda.set_per_process_memory_fraction(0.1)
        torch.empty(900 << 20, dtype=torch.uint8, device="cuda")
    """
    arguments = ["--memory", "2GB", "--allocator", "pyalloc"]
    code, _, err = finish(start([*arguments, sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 1
    assert "does not fit the limit that was set" in err
    assert "next: pyalloc dryrun --memory 2GB" in err and "(with a higher limit, or none)" in err


def test_exit_codes_and_errors_pass_through(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    source = "import torch; torch.ones(1).cuda().item(); raise SystemExit(37)"
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
        print("ready", flush=True)
        try:
            time.sleep(800)
        except KeyboardInterrupt:
            sys.exit(9)
    """
    process = start([sys.executable, program(tmp_path, source)], tmp_path)
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
    assert "not known: the program was ended by SIGKILL" in err
    assert "figures          none" in err and " 0 bytes" not in err


def test_an_unhandled_ctrl_c_loses_no_figures(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    source = (
        "import os, signal, torch; torch.ones(1 << 20).cuda(); os.kill(os.getpid(), signal.SIGINT)"
    )
    code, _, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 128 + signal.SIGINT
    assert "peak allocated   4.0 MiB" in err
    assert "not known: the program was ended by SIGINT" in err


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
    # Nothing of it is overwritten, and --force takes only what is surely of an earlier recording.
    (tmp_path / "out.pya").rename(tmp_path / "out.pya.part")
    assert finish(start(["--record", "out.pya", *command], tmp_path))[0] == 2
    recording.prepare(tmp_path / "out.pya", stacks="none", automatic=False, force=True)
    assert (tmp_path / "out.1.pya").exists()
    assert not (tmp_path / "out.pya.part").exists()


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


def test_a_gradient_scaler_takes_every_step(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """It asks the device whether gradients overflowed, and would find there what lay there before."""
    source = """
        import torch
        ones = [torch.ones(4).cuda() for _ in range(50)]
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        scaler = torch.amp.GradScaler("cuda")
        del ones
        scaler.scale(model(torch.ones(2, 8).cuda()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.state[model.weight]["momentum_buffer"].shape == (8, 8)
    """
    script = program(tmp_path, source)
    code, _, err = finish(start(["--record", "out.pya", sys.executable, script], tmp_path))
    assert code == 0, err
    found = trace.analyse(tmp_path / "out.pya")
    lines = [row.name for row in found.by_line(found.moments[max(found.moments)].blocks)]
    assert any(name.endswith("program.py:9 <module>") for name in lines), lines
    assert not any("pyalloc" in name or "_bootstrap" in name for name in lines)
    kinds = [row.name for row in found.contributors(found.moments[max(found.moments)])]
    assert "optimizer state (SGD)" in kinds


def test_generate_goes_on_to_its_largest_length(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """It asks the device whether all sequences have ended, and would never stop, or at once."""
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    source = """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2,
            bos_token_id=None, eos_token_id=5, pad_token_id=0,
        )).cuda().eval()
        ones = [torch.ones(2, dtype=torch.int64).cuda() for _ in range(50)]  # lie where torch.ones(2) will
        del ones
        prompt = torch.ones(2, 8, dtype=torch.int64).cuda()
        passes = []
        model.register_forward_hook(lambda *_: passes.append(1))
        with torch.no_grad():
            for beams in (1, 3):
                for n_new in (4, 9):
                    passes.clear()
                    model.generate(prompt, max_new_tokens=n_new, num_beams=beams, do_sample=False)
                    print(beams, len(passes), flush=True)
    """
    code, out, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0, err
    assert out.splitlines() == ["1 4", "1 9", "3 4", "3 9"], out


@pytest.mark.parametrize("given", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_on_beside_other_settings(
    torch_found: hostcuda.Torch, tmp_path: Path, given: str
) -> None:
    """Under either name: torch knows one or both, and which of them wins changed."""
    source = """
        import torch
        x = torch.empty(1, device="cuda")
        print(torch.cuda.memory_snapshot()[0]["is_expandable"])
    """
    command = ["--allocator", "expandable", sys.executable, program(tmp_path, source)]
    settings = {given: "garbage_collection_threshold:0.5"}
    code, out, err = finish(start(command, tmp_path, **settings))
    assert (code, out) == (0, "True\n"), err


def test_settings_that_would_leave_pyalloc_out_are_refused_first(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    command = ["--allocator", "pyalloc", sys.executable, "-c", "print('ran')"]
    for name, value, code in (
        ("PYALLOC_CONF", "memroy:tight", 2),
        ("PYTORCH_ALLOC_CONF", "backend:native", 3),
    ):
        ended, out, err = finish(start(command, tmp_path, **{name: value}))
        assert (ended, out) == (code, ""), err
    for options in (["--json", "no/where.json"], ["--record", "no/where.pya"], ["--memory", "24"]):
        ended, out, err = finish(start([*options, *command[2:]], tmp_path))
        assert (ended, out) == (2, ""), err
        assert "Traceback" not in err


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
    # -S leaves site-packages out, so that only the bootstrap can find pyalloc.
    source = "import sitecustomize, sys, pyalloc; print(pyalloc.__file__)"
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


def test_children_are_counted_too(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    source = """
        import os, subprocess, sys, torch
        torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
        here = torch.empty(60 << 20, dtype=torch.uint8, device="cuda:1")
        child = "import torch; torch.empty(100 << 20, dtype=torch.uint8, device='cuda')"
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
        subprocess.run([sys.executable, "-c", child], env=env, check=True)
    """
    arguments = ["--memory", "150MB", "--devices", "2", "--json", "figures.json"]
    code, _, err = finish(start([*arguments, sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0, err
    devices = json.loads((tmp_path / "figures.json").read_text())["devices"]
    seen = {(use["device"], use["physical"]): use["peak_device_bytes"] >> 20 for use in devices}
    assert seen == {(0, 0): 10, (1, 1): 60, (0, 1): 100}
    # On a card both would be in the same memory.
    shown = flat(err)
    assert "fits 150.0 MiB only if its processes do not peak at the same time" in shown
    assert "warning: 2 processes used device 1" in shown and "up to 160.0 MiB together" in shown
    assert "next: pyalloc dryrun --memory 150MiB --devices 2 --allocator pyalloc " in err


def test_one_of_the_devices_may_be_chosen_by_the_program(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """As launchers do: NVML, which torch counts with, knows all devices of the machine."""
    source = """
        import ctypes, os, torch
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        assert torch.cuda.device_count() == 1, torch.cuda.device_count()
        kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        print(torch.cuda.get_allocator_backend(), torch.cuda.device_count())
        # as torch.cuda.device_memory_used() does
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle, bytes_of = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
        for number in range(2):
            assert nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0
            assert nvml.nvmlDeviceGetMemoryInfo(handle, bytes_of) == 0
            is_used = number == torch.cuda._get_nvml_device_index(0)
            assert (bytes_of[2] > 0) == is_used, (number, bytes_of[2])
        bus = torch.cuda.get_device_properties(0).pci_bus_id
        assert nvml.nvmlDeviceGetHandleByPciBusId_v2(b"0000:%02x:00.0" % bus, ctypes.byref(handle)) == 0
        assert nvml.nvmlDeviceGetMemoryInfo(handle, bytes_of) == 0 and bytes_of[2] > 0
    """
    arguments = ["--devices", "2", "--allocator", "pyalloc", "env"]
    command = [sys.executable, program(tmp_path, source)]
    for chosen in ([], ["CUDA_VISIBLE_DEVICES=1"]):
        code, out, err = finish(start([*arguments, *chosen, *command], tmp_path))
        assert (code, out) == (0, "pluggable 1\n"), err


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


def test_what_is_rounding_is_told_apart(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """torch's allocator counts a whole block where less than 1 MiB would be left of it."""
    source = "import torch; torch.empty((20 << 20) - 700_000, dtype=torch.uint8, device='cuda')"
    code, _, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0
    assert "peak allocated   20.0 MiB (19.3 MiB asked for, the rest is rounding)" in err


def test_a_cpu_build_is_refused_with_the_reason(tmp_path: Path) -> None:
    fake = tmp_path / "torch"
    (fake / "lib").mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "version.py").write_text("__version__ = '9.9.9+cpu'\n")
    code, _, err = finish(
        start(
            [sys.executable, "-c", "pass"],
            tmp_path,
            PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]),
        )
    )
    assert code == 3
    assert "9.9.9+cpu" in err
    assert "built without CUDA" in err


def test_where_no_library_can_be_preloaded_is_said(
    torch_found: hostcuda.Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostcuda, "preloads", lambda major: [Path("/my programs/libcuda.so.1")])
    monkeypatch.setattr(hostcuda, "LIBRARIES", Path("/my programs"))
    with pytest.raises(hostcuda.HostCudaError, match="space or a colon: /my programs"):
        hostcuda.environment({}, torch_found)


def test_a_python_without_torch_is_named_beside_the_one_that_has_it(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho '\"\"'\n")
    other.chmod(0o755)
    code, _, err = finish(start([str(other), "x.py"], tmp_path))
    assert code == 3
    assert f"{other} has no PyTorch" in err and sys.executable in err
    other.write_text("#!/bin/sh\necho 'ImportError: no luck' >&2\nexit 1\n")
    code, _, err = finish(start([str(other), "x.py"], tmp_path))
    assert code == 3
    assert f"{other} could not be asked for its PyTorch: ImportError: no luck" in err


def test_a_python_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostcuda, "_ANSWER_S", 0.01)
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\nexec sleep 60\n")
    other.chmod(0o755)
    with pytest.raises(hostcuda.HostCudaError, match="did not tell within"):
        hostcuda.find_torch(str(other))


def test_files_of_the_working_directory_do_not_hide_torch(
    torch_found: hostcuda.Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -c` looks there first; the program itself, elsewhere, never would."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    assert hostcuda.find_torch(sys.executable).folder == torch_found.folder


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    code, _, err = finish(start(["no-such-program"], tmp_path))
    assert code == 2
    assert "'no-such-program' was not found" in err
    code, _, err = finish(start([], tmp_path))
    assert code == 2
    assert "which program?" in err


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_run_side_by_side(
    torch_found: hostcuda.Torch, tmp_path: Path, backend: str
) -> None:
    """Gloo moves real bytes; NCCL's calls are answered, as if all ranks held the same."""
    source = f"""
        import os, torch
        import torch.distributed as dist
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group({backend!r})
        model = torch.nn.Linear(1000, 1000).cuda()
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        model(torch.randn(8, 1000, device="cuda")).sum().backward()
        dist.all_reduce(next(model.parameters()).grad)
        mine = torch.arange(4.0).cuda()
        everyone = torch.zeros(8, device="cuda")
        dist.all_gather_into_tensor(everyone, mine)
        assert everyone.cpu().tolist() == [0.0, 1.0, 2.0, 3.0] * 2
        dist.destroy_process_group()
    """
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    arguments = ["--memory", "2GB", "--devices", "2", "--json", "figures.json", sys.executable]
    code, _, err = finish(start([*arguments, *command, program(tmp_path, source)], tmp_path))
    assert code == 0, err[-4000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    used = [use for use in figures["devices"] if use["peak_device_bytes"] >= 4_000_000]
    assert {use["device"] for use in used} == {0, 1}

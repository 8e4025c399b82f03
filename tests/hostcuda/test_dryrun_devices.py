"""pyalloc dryrun: several devices, and processes that share them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from dry_support import PATIENCE_S, RunPython

from pyalloc import _bootstrap
from pyalloc.outside import dryrun, hostcuda

from .dryrun_support import finish, flat, program, start


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
    assert "fits 150.0 MiB, but only if its processes do not peak at the same time" in shown
    assert "warning: 2 processes used device 1" in shown and "up to 160.0 MiB in total" in shown
    assert "next: pyalloc dryrun --memory 150MiB --devices 2 --allocator pyalloc " in err


def test_processes_that_follow_each_other_share_no_device(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """As in a sweep of settings, or after a launcher's restart."""
    source = """
        import subprocess, sys
        child = "import torch; torch.empty(100 << 20, dtype=torch.uint8, device='cuda')"
        for _ in range(2):
            subprocess.run([sys.executable, "-c", child], check=True)
    """
    words = ["--memory", "150MB", sys.executable, program(tmp_path, source)]
    code, _, err = finish(start(words, tmp_path))
    assert code == 0, err
    shown = flat(err)
    assert shown.count(" device 0: allocated 100.0 MiB") == 2, err
    assert "at the same time" not in shown and "processes used device" not in shown, err


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


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_run_side_by_side(
    torch_found: hostcuda.Torch, tmp_path: Path, backend: str
) -> None:
    """Gloo moves real bytes; NCCL's calls are answered as if all ranks held the same."""
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


def test_what_ranks_exchange_is_what_this_one_sends(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Sizes travel this way before the data: if nothing were received, all later sizes would be wrong."""
    source = """
        import os, torch
        import torch.distributed as dist
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        sizes = torch.tensor([3, 5]).cuda()
        got = torch.full((2,), 77).cuda()
        dist.all_to_all_single(got, sizes)
        assert got.cpu().tolist() == [sizes[rank].item()] * 2, got
        apart = [torch.full((2,), 77).cuda() for _ in range(2)]
        given = [torch.tensor([n, 9]).cuda() for n in (6, 7)]
        dist.all_to_all(apart, given)
        assert [one.cpu().tolist() for one in apart] == [[6 + rank, 9]] * 2, apart
        shape = torch.full((2,), 77).cuda()
        ops = [dist.P2POp(dist.isend, sizes, 1 - rank), dist.P2POp(dist.irecv, shape, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert shape.cpu().tolist() == [3, 5], shape
        backend = dist.group.WORLD._get_backend(torch.device("cuda", rank))
        if torch.__version__ >= (2, 15):  # before, on cards with multicast only
            with torch.cuda.use_mem_pool(torch.cuda.MemPool(backend.mem_allocator)):
                assert torch.arange(3).cuda().cpu().tolist() == [0, 1, 2]
        dist.destroy_process_group()
    """
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    arguments = ["--memory", "2GB", "--devices", "2", sys.executable]
    code, _, err = finish(start([*arguments, *command, program(tmp_path, source)], tmp_path))
    assert code == 0, err[-4000:]


def test_one_process_trains_on_two_devices(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """DataParallel has one communicator for each device, and sums gradients on the first."""
    source = """
        import torch
        model = torch.nn.DataParallel(torch.nn.Linear(1000, 1000).cuda())
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.randn(8, 1000).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert min(torch.cuda.max_memory_allocated(n) for n in (0, 1)) > 4_000_000
    """
    arguments = ["--memory", "2GB", "--devices", "2"]
    code, _, err = finish(start([*arguments, sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0, err[-4000:]
    assert "fits 2.00 GiB" in err


def test_a_process_that_nobody_waited_for_ends_without_a_word(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """It complained twice that the folder for its figures does not exist."""
    source = """
        import subprocess, sys, torch
        torch.ones(1, device="cuda")
        child = '''
        import os, time, torch
        torch.ones(1, device="cuda")
        print("runs", flush=True)
        while os.path.exists(os.environ["PYALLOC_DRYRUN_REPORT"]):
            time.sleep(0.01)
        '''
        left = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
        assert left.stdout.readline() == "runs\\n"
    """
    code, _, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0
    assert "atexit" not in err and "counters" not in err, err


def test_a_signal_in_the_moment_of_the_start_reaches_the_program(
    torch_found: hostcuda.Torch,
) -> None:
    """The command ended and left the program running."""
    source = """
import os, signal, subprocess, sys
from pyalloc.outside import dryrun
class Begun(subprocess.Popen):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        if "program" in given[0]:
            os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Begun
program = "import sys; sys.stdin.read()"
print(dryrun.run(dryrun.Options((sys.executable, "-c", program, "program"))).exit_code)
"""
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as command:
        code = command.wait(timeout=PATIENCE_S)
        told, _ = command.communicate()  # a program that was left running ends when its input does
    assert (code, told) == (0, f"{128 + signal.SIGTERM}\n")


def test_what_is_ignored_is_ignored_in_the_program(
    torch_found: hostcuda.Torch, run_python: RunPython
) -> None:
    """As with nohup."""
    done = run_python("""
        import signal, sys
        from pyalloc.outside import dryrun
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        program = "import signal; print(signal.getsignal(1) == signal.SIG_IGN, signal.getsignal(15))"
        dryrun.run(dryrun.Options((sys.executable, "-c", program)))
        """)
    assert done.stdout.split() == ["True", "0"]


def test_figures_that_come_while_their_folder_goes(
    torch_found: hostcuda.Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the removal of its files and its own: it was not empty, and the summary was lost."""
    folders: list[Path] = []
    environment, remove = dryrun.child_environment, os.rmdir

    def noting(*given: Any) -> dict[str, str]:
        env = environment(*given)
        folders.append(Path(env[_bootstrap.REPORT]))
        return env

    def late(path: str, **named: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            (folders[0] / "torch.7.json").touch()
        remove(path, **named)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(dryrun, "child_environment", noting)
    monkeypatch.setattr(os, "rmdir", late)
    assert dryrun.run(dryrun.Options((sys.executable, "-c", ""))).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_process_whose_folder_goes_while_it_sums_up(
    dry_python: RunPython, tmp_path: Path
) -> None:
    (tmp_path / "told").mkdir()
    done = dry_python(
        """
        import os, torch
        torch.ones(1, device="cuda")
        ask = torch.cuda.memory_stats
        def late(device):
            folder = os.environ["PYALLOC_DRYRUN_REPORT"]
            if os.path.exists(folder):
                for name in os.listdir(folder):
                    os.unlink(f"{folder}/{name}")
                os.rmdir(folder)
            return ask(device)
        torch.cuda.memory_stats = late
        """,
        env={_bootstrap.REPORT: str(tmp_path / "told")},
    )
    assert done.stderr == "" and list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_given_next(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """As many as ranks were started; the first that fails ends the others."""
    source = """
        import os, torch
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    """
    ranks = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    code, _, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path, **ranks))
    assert code == 1 and "invalid device ordinal" in err
    assert "unknown: the program asked for a device that --devices 1 does not provide" in flat(err)
    assert "look at the messages" not in err
    assert "next: pyalloc dryrun --memory 80GB --devices 4 --allocator native " in err

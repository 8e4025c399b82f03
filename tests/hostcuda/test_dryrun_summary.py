"""pyalloc dryrun: the summary of given figures."""

from __future__ import annotations

import errno
import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyalloc.outside import dryrun, hostcuda
from pyalloc.report.dryrun import summary

from .dryrun_support import finish, flat, program, start


def result(memory: int, **changed: Any) -> dryrun.Result:
    """Of a program with two processes, each of which peaks at a bit more than half of that on one device."""
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


@pytest.mark.parametrize(
    ("first", "is_other"),
    [
        ("#!{}", True),
        ("#! {} -u", True),
        ("#!/usr/bin/env python3.999", True),
        ("#!/usr/bin/env -S python3.999 -u", True),
        ("#!{}t", True),
        ("#!/usr/bin/env python3.998", False),
        ("#!/bin/sh python3.999", False),
        ("import torch", False),
    ],
)
def test_the_python_of_a_script_is_that_of_its_first_line(
    first: str, is_other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its PyTorch may use another CUDA than that of the Python that runs pyalloc."""
    is_free_threaded = first.endswith("t")
    other, script = tmp_path / f"python3.999{'t' * is_free_threaded}", tmp_path / "train"
    script.write_text(f"{first.format(tmp_path / 'python3.999')}\n")
    for path in (other, script):
        path.touch()
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert dryrun._interpreter([str(script)]) == (str(other) if is_other else sys.executable)
    assert dryrun._interpreter([str(other)]) == str(other)


def test_summary_fits_80_columns() -> None:
    """Except the next command, which is copied as it is."""
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
            "masks": 12_345,
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
        text = summary(result(8 << 30, **{**wide, **changed}))
        *lines, last = text.splitlines()
        assert last.startswith("  next: ")
        assert [line for line in lines if len(line) > 80] == []
        assert text.count("process 4194304 device 15: allocated 5.00 GiB") == 1


FULL = {"unwritten": (9,), "unwritten_error": errno.ENOSPC, "temporary": "/some/where"}
ONE = (dryrun.DeviceUse(1, 0, 0, 8 << 30, 5 << 30, None, None, None),)
NONE: dict[str, Any] = {"devices": (), "fits": False}
DIED = {"exit_code": 1, "error": "OutOfMemoryError", "fits": False}
DIED_OF = "the program died of torch.OutOfMemoryError"


WAIT = "let all processes end by themselves before the program does (for a Pool: close() and join()), or add --record"


@pytest.mark.parametrize(
    ("changed", "verdict", "first"),
    [
        ({}, "fits 8.00 GiB, but only if its processes do not peak at the same time", ""),
        ({"devices": ONE}, "fits 8.00 GiB", ""),
        ({"ooms": 1}, "fits 8.00 GiB, after 1 out-of-memory error that the program caught", ""),
        ({"ooms": 2}, "fits 8.00 GiB, after 2 out-of-memory errors that the program caught", ""),
        (DIED, f"does not fit 8.00 GiB: {DIED_OF}", ""),
        ({**DIED, "limited": True}, f"does not fit the limit that was set: {DIED_OF}", ""),
        (
            {**DIED, "limited": True, "allocator": "pyalloc"},
            f"does not fit the limit that was set: {DIED_OF}",
            "raise or remove the limit",
        ),
        (
            {**DIED, "needed_bytes": 9 << 30},
            f"does not fit 8.00 GiB: {DIED_OF}; even with nothing wasted it needed 9.00 GiB",
            "",
        ),
        (
            {**DIED, "needed_bytes": (8 << 30) + 1},
            f"does not fit 8,589,934,592 bytes: {DIED_OF}; even with nothing wasted it needed 8,589,934,593 bytes",
            "",
        ),
        (
            {"exit_code": 1, "fits": False, "wanted_devices": 4},
            "unknown: the program asked for a device that --devices 1 does not provide",
            "",
        ),
        (
            NONE,
            "the program used no device memory",
            'let the program move something to "cuda", for example with model.to("cuda")',
        ),
        (
            {**NONE, "still_running": (9,)},
            "unknown: the process that used the device is still running",
            WAIT,
        ),
        ({**NONE, "killed": (9,)}, "unknown: the process that used the device was killed", WAIT),
        ({"devices": ONE, "killed": (9,)}, "fits 8.00 GiB", ""),
        (
            {**NONE, **FULL},
            "unknown: the process that used the device could not write its figures (No space left on device)",
            "make room in /some/where, or set TMPDIR to a folder that has some",
        ),
        (
            {"devices": ONE, **FULL, "unwritten_error": errno.EFBIG},
            "fits 8.00 GiB",
            "lift the limit: ulimit -f unlimited",
        ),
        ({"devices": ONE, "unreached": "python -I"}, "fits 8.00 GiB", "leave out that option"),
        (
            {"no_addresses": True, "fits": False, "exit_code": 1},
            "unknown: this process may not reserve enough address space for a device's memory",
            f"lift the limit: {hostcuda.LIFT}",
        ),
    ],
)
def test_the_verdict_and_what_to_do_first(
    changed: dict[str, Any], verdict: str, first: str
) -> None:
    text = flat(summary(result(8 << 30, **changed)))
    told = text.partition(" verdict ")[2]
    assert re.split(" (?:note|warning|first|next): | process 1 ", told)[0] == verdict
    assert re.split(": recordings stay| next: ", text.partition(" first: ")[2])[0] == first


def test_only_processes_that_use_a_device_at_a_time_are_added_up() -> None:
    use = result(8 << 30).devices[0]
    times = [(10, 40), (20, 50), (60, 90), (70, 80)]  # as of two ranks that are restarted
    uses = tuple(
        replace(use, pid=pid, peak_device_bytes=pid << 30, began_ns=began, ended_ns=ended)
        for pid, (began, ended) in enumerate(times, 1)
    )
    text = flat(summary(result(8 << 30, devices=uses)))
    assert "note: 4 processes used device 0, at most 2 at a time, each with 8.00 GiB" in text
    assert "they need up to 7.00 GiB in total" in text
    unknown = (uses[0], replace(uses[1], began_ns=0, ended_ns=100), *uses[2:])
    text = flat(summary(result(8 << 30, devices=unknown)))
    assert "warning: 4 processes used device 0, at most 3 at a time" in text
    assert "they need up to 9.00 GiB in total" in text


def test_torch_that_is_too_old_to_follow_changes_is_named() -> None:
    said = "with PyTorch 2.8.0, numbers that the program changes in place"
    assert said in flat(summary(result(8 << 30, torch="2.8.0", unfollowed=True)))
    assert "in place" not in summary(result(8 << 30, torch="2.15.0"))


def test_two_sizes_that_are_compared_read_differently() -> None:
    text = flat(summary(result(8 << 30)))
    assert "each with 8,589,934,592 bytes of its own here" in text
    assert "they need up to 8,589,935,592 bytes in total" in text
    assert "next: pyalloc dryrun --memory 8GB " in text
    assert "each with 683.6 KiB of its own here" in flat(summary(result(700_000)))
    assert "warning: 2 processes used device 0" in text
    fewer = tuple(replace(use, peak_device_bytes=4 << 30) for use in result(8 << 30).devices)
    text = flat(summary(result(8 << 30, devices=fewer)))
    assert "note: 2 processes used device 0" in text and "but only if" not in text
    assert "next: pyalloc dryrun --memory 700000 " in summary(result(700_000))


def test_what_is_less_than_was_asked_for_is_no_rounding() -> None:
    """A freed block that another stream still uses is requested, not allocated."""
    told: dict[str, int | None] = {
        "peak_allocated_bytes": 30 << 20,
        "peak_requested_bytes": 64 << 20,
    }
    assert "rounding" not in summary(result(1 << 30, **told))
    for untold in (None, 0, 30 << 20):  # cudaMallocAsync does not count it
        told["peak_requested_bytes"] = untold
        assert "rounding" not in summary(result(1 << 30, **told))
    told = {"peak_allocated_bytes": 66 << 20, "peak_requested_bytes": 64 << 20}
    text = summary(result(1 << 30, **told))
    assert "66.0 MiB (64.0 MiB requested, the rest is rounding)" in text


def test_a_program_that_gives_up_after_an_out_of_memory_error_probably_does_not_fit() -> None:
    """Launchers and scripts catch the error, print it and exit: there is no exception left to see."""
    text = flat(summary(result(8 << 30, exit_code=1, fits=False, ooms=2)))
    assert (
        "probably does not fit 8.00 GiB: the program ended with exit code 1 after 2 out-of-memory errors"
        in text
    )
    assert text.endswith("next: pyalloc dryrun --memory 8GB --allocator pyalloc python train.py")
    nothing = {
        "exit_code": 0,
        "fits": False,
        "ooms": 1,
        "devices": (),
    }  # a child of it had the error
    text = flat(summary(result(8 << 30, **nothing)))
    assert "probably does not fit 8.00 GiB: the program ended with exit code 0 after 1 out" in text
    for other in ({"error": "KeyError"}, {"exit_code": 134}, {"ooms": 0}):
        changed = {"exit_code": 1, "fits": False, "ooms": 2, **other}
        text = summary(result(8 << 30, **changed))
        assert "verdict          unknown: the program" in text
        first, command = text.splitlines()[-2:]
        assert first == "  first: look at the messages above"
        assert command == "  next: pyalloc dryrun --memory 8GB --allocator native python train.py"


def test_a_program_that_installs_pyalloc_itself_is_run_as_it_is(tmp_path: Path) -> None:
    script, tool = tmp_path / "train.py", tmp_path / "tool.py"
    for file, mode in ((script, 0o644), (tool, 0o755)):
        file.write_text("#!/bin/true\n")
        file.chmod(mode)
    for command, following in (
        (("python", "train.py"), "python train.py"),
        ((str(script), "-v"), f"python {script} -v"),
        (("--", str(script)), f"python {script}"),
        ((str(tool),), str(tool)),
    ):
        text = summary(result(8 << 30, command=command, replaced=True))
        assert text.endswith(f"\n  next: {following}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_was_ended_from_outside_fits_so_far(number: signal.Signals) -> None:
    """A few steps of a long training are enough, and it is then ended with Ctrl-C; `timeout` sends SIGTERM."""
    ended = {"exit_code": 128 + number, "fits": False}
    for allocator, following in (
        ("native", "pyalloc dryrun --memory 8GB --allocator pyalloc python train.py"),
        ("pyalloc", "pyalloc run python train.py"),
    ):
        text = summary(result(8 << 30, **ended, allocator=allocator))
        assert (
            f"  verdict          fits 8.00 GiB so far: the program was ended by {number.name}\n"
            in text
        )
        assert "  first:" not in text
        assert text.endswith(f"next: {following}")
    text = summary(result(8 << 30, **ended, devices=()))
    assert f"unknown: the program was ended by {number.name}" in text
    assert "first: let it run until it has used the device" in text
    text = summary(result(8 << 30, **ended, ooms=1))
    assert f"unknown: the program was ended by {number.name}" in text
    assert "first: look at the messages above" in text


def test_a_signal_that_python_cannot_hear_of_leaves_no_messages_to_look_at() -> None:
    untold: dict[str, Any] = {"devices": (), "device_calls": 0, "killed": (9,)}
    text = flat(summary(result(8 << 30, exit_code=143, fits=False, **untold)))
    assert "figures none: the program was ended before it could report them" in text
    assert "unknown: the program was ended by SIGTERM first: stop it with SIGINT" in text
    text = flat(summary(result(8 << 30, exit_code=130, fits=False, **untold)))
    assert "first: let it run until it has used the device" in text  # it had been heard
    text = summary(result(8 << 30, exit_code=139, fits=False))
    assert "unknown: the program was ended by SIGSEGV" in text and "messages above" in text


@pytest.mark.parametrize("ended", [{"exit_code": 143, "device_calls": 0}, {"exit_code": 0}])
def test_what_is_to_be_done_first_fits_80_columns(ended: dict[str, Any]) -> None:
    text = summary(result(8 << 30, **ended, devices=(), fits=False, killed=(9,)))
    assert "or add --record: " in flat(text)
    assert max(map(len, text.splitlines()[:-1])) <= 80  # the last is a command, to be copied


@pytest.mark.parametrize("ended", [{"exit_code": 143, "device_calls": 0}, {"exit_code": 0}])
def test_what_is_recorded_is_not_told_to_add_record(ended: dict[str, Any]) -> None:
    known = {"devices": (), "fits": False, "killed": (9,), "is_recorded": True}
    text = flat(summary(result(8 << 30, **ended, **known)))
    assert " first: " in text and "--record" not in text


def test_a_program_that_was_killed_may_have_been_so_by_the_system() -> None:
    """No messages say so: what is copied to the device is held in this machine's own memory."""
    text = flat(summary(result(8 << 30, exit_code=137, fits=False, device_calls=0)))
    assert "unknown: the program was ended by SIGKILL" in text
    assert "first: check whether this machine itself ran out of memory" in text


def test_a_program_that_never_called_cuda_has_no_figures() -> None:
    unused: dict[str, Any] = {"devices": (), "device_calls": 0, "memory_calls": 0, "launches": 0}
    for code in (0, 1):
        text = summary(result(8 << 30, exit_code=code, fits=False, **unused))
        assert "  figures          none: the program did not call CUDA\n" in text
        assert "unknown\n" not in text and " 0 bytes" not in text
    for became, pids in (("was killed", "killed"), ("is still running", "still_running")):
        text = summary(result(8 << 30, fits=False, **unused, **{pids: (9,)}))
        assert f"  figures          none: the process that called CUDA {became}\n" in text


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (0, "warning: {}; no kernel ran, so sizes and errors that depend on these values are wrong"),
        (2, "warning: {}, 2 of them with correct values; no kernel ran, so sizes and errors that"
            " depend on the others are wrong"),
        (3, "note: {}; these values are right, although no kernel ran"),
    ],
)  # fmt: skip
def test_only_values_that_nobody_computed_are_warned_of(known: int, expected: str) -> None:
    shown = flat(summary(result(1 << 30, dtoh_copies=3, dtoh_bytes=24, known_copies=known)))
    assert expected.format("the program read 24 bytes back from the device in 3 copies") in shown


def test_of_many_processes_those_that_took_most_are_shown() -> None:
    one = dryrun.DeviceUse(1, 0, 0, 1 << 30, 5 << 20, None, None, None)
    few = [replace(one, pid=pid) for pid in range(1, 33)]
    shown = flat(summary(result(1 << 30, devices=tuple(few))))
    assert "process 32 device 0" in shown and "others" not in shown
    many = [replace(use, peak_device_bytes=use.pid << 20) for use in few]
    more = (many[0], replace(one, pid=50, peak_device_bytes=1 << 20), *many[1:])
    text = flat(summary(result(1 << 30, devices=more)))
    assert text.count(" device 0: ") == 32
    assert "process 50 " not in text and text.index("process 1 ") < text.index("process 32 ")
    assert "1 other: at most 1.0 MiB of device bytes; --json FILE has them all" in text
    more += (replace(one, pid=60, peak_device_bytes=9 << 10),)
    assert "2 others: at most 1.0 MiB of device bytes" in flat(
        summary(result(1 << 30, devices=more))
    )


def test_one_kernel_is_one() -> None:
    assert "and 1 kernel (which computed nothing)" in flat(summary(result(8 << 30)))
    assert "and 2 kernels (" in flat(summary(result(8 << 30, launches=2)))
    assert " back from the device in 1 copy;" in flat(summary(result(8 << 30, dtoh_copies=1)))


def test_more_memory_comes_next_where_no_allocator_could_do_with_less() -> None:
    died = {"exit_code": 1, "error": "OutOfMemoryError", "fits": False}
    for needed, following in ((0, "8GB --allocator pyalloc"), (8 << 30, "8GB --allocator pyalloc"),
                              ((8 << 30) + 1, "16GB --allocator native"),
                              (99 << 30, "128GB --allocator native")):  # fmt: skip
        text = summary(result(8 << 30, needed_bytes=needed, **died))
        assert text.endswith(f"next: pyalloc dryrun --memory {following} python train.py")
    text = summary(result(8 << 30, needed_bytes=99 << 30))  # that error was caught
    assert text.endswith("next: pyalloc dryrun --memory 8GB --allocator pyalloc python train.py")


def test_as_many_devices_come_next_as_the_program_needs() -> None:
    """No more than a machine has: a wrong number in the program asks for any."""
    wanting = {"exit_code": 1, "fits": False}
    for changed, following in (
        ({"n_devices": 2}, "8GB --devices 2 --allocator pyalloc"),
        ({"wanted_devices": 4, **wanting}, "8GB --devices 4 --allocator native"),
        ({"n_devices": 4, "wanted_devices": 5, **wanting}, "8GB --devices 5 --allocator native"),
        ({"wanted_devices": 999, **wanting}, "8GB --devices 16 --allocator native"),
    ):
        text = summary(result(8 << 30, **changed))
        assert text.endswith(f"next: pyalloc dryrun --memory {following} python train.py")


def test_a_program_that_used_no_device_memory_is_told_how_it_would() -> None:
    text = summary(result(8 << 30, fits=False, devices=()))
    assert 'first: let the program move something to "cuda"' in text
    assert text.endswith("next: pyalloc dryrun --memory 8GB --allocator native python train.py")


def test_what_a_card_holds_besides_is_told_where_little_is_left() -> None:
    told = "note: a card also has to hold the CUDA context"
    for left, is_told in ((1 << 29, True), (3 << 29, False)):
        text = flat(summary(result(8 << 30, peak_device_bytes=(8 << 30) - left)))
        assert (told in text) == is_told
    assert "not counted here, and 512.0 MiB are left" in flat(
        summary(result(8 << 30, peak_device_bytes=(8 << 30) - (1 << 29)))
    )
    assert told not in flat(summary(result(8 << 30, fits=False, peak_device_bytes=8 << 30)))


def test_one_rank_that_was_out_of_memory_is_the_reason(tmp_path: Path) -> None:
    """The others die of its end, and may be listed first."""
    for pid, error in ((1, "DistBackendError"), (2, "OutOfMemoryError")):
        report = {"pid": pid, "backend": "native", "error": error, "limited": False, "devices": {}}
        (tmp_path / f"torch.{pid}.json").write_text(json.dumps(report))
    torch = hostcuda.Torch(tmp_path, "2.15.0", 13, frozenset())
    found = dryrun._sum_up(dryrun.Options(("train.py",)), torch, (), 1, tmp_path)
    assert (found.error, found.ooms) == ("OutOfMemoryError", 1)


@pytest.mark.parametrize("is_full_before", [False, True])
def test_figures_that_cannot_be_written_are_told(tmp_path: Path, is_full_before: bool) -> None:
    """The disk was full, and the program was said to have been killed, or not to have used the device."""
    source = f"""
        import errno, pathlib, resource, sys, torch
        def no_room(*_):
            raise OSError(errno.ENOSPC, "no room")
        if {is_full_before}:
            pathlib.Path.touch = no_room
        torch.ones(1, device="cuda")
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        """
    run = start([sys.executable, program(tmp_path, source)], tmp_path, TMPDIR=str(tmp_path))
    code, _, err = finish(run)
    text = flat(err)
    told = "could not write its figures (File too large)"
    assert code == 0 and f"figures none: the process that called CUDA {told}" in text
    assert f"verdict unknown: the process that used the device {told}" in text
    assert f"are missing: they could not be written to {tmp_path} (File too large)" in text
    assert "first: lift the limit: ulimit -f unlimited" in text and "Exception ignored" not in text

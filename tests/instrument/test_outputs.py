"""Where commands write: nothing overwritten, full disks, closed streams, file names, commands that are ended midway."""

from __future__ import annotations

import json
import lzma
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from dry_support import PATIENCE_S, wait_until

from instrument.tools import ROOT, Plan, pyalloc, small_trace
from pyalloc import cli, trace
from pyalloc.common import console
from pyalloc.errors import TraceError, UsageError


def test_no_output_replaces_the_trace_it_is_made_from(plan: Plan, tmp_path: Path) -> None:
    path, link = small_trace(plan), tmp_path / "link.html"
    link.symlink_to(path)
    content = path.read_bytes()
    for words in (
        ["stats", path, "-o", path],
        ["report", path, path, "-o", path],
        ["export", path, "--to", "csv", "-o", link],
    ):
        assert "write to another file" in pyalloc(*words, "--force", expect=2)
    assert path.read_bytes() == content
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(pickle.dumps({"segments": []}, protocol=4))
    for words in (["--force"], []):
        told = pyalloc("export", snapshot, "--to", "torch", *words, expect=2)
        assert "write to another file" in told
    pyalloc("export", snapshot, "--to", "json")
    assert json.loads((tmp_path / "snapshot.json").read_text())["file"] == str(snapshot)


def test_a_file_that_was_made_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    with pytest.raises(UsageError, match="already exists"), console.writing(target, False) as file:
        file.write(b"of the slower of two commands")
        target.write_text("of the faster")
    assert target.read_text() == "of the faster" and list(tmp_path.iterdir()) == [target]


def test_figures_of_a_dry_run_do_not_replace_its_recording(tmp_path: Path) -> None:
    out = tmp_path / "out.pya"
    words = ["dryrun", "--record", out, "--json", out, "--force", sys.executable, "-c", ""]
    assert "write the figures to another file" in pyalloc(*words, expect=2)


@pytest.mark.parametrize(
    ("flags", "why"), [(os.ST_RDONLY, "read-only file system"), (0, "permission denied")]
)
def test_why_no_file_can_be_made_is_said(
    plan: Plan,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: int,
    why: str,
) -> None:
    path = small_trace(plan)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags | os.ST_NOSUID))
    for words in (
        ["report", path, "-o", path.with_name("report.txt")],
        ["plan", path],
        ["export", path, "--to", "csv"],
        ["dryrun", "--record", path.with_name("out.pya"), "python", "program.py"],
    ):
        assert cli.main([str(word) for word in words]) == 2, words
        shown = " ".join("".join(capsys.readouterr()).split())
        assert f"cannot create a file in {path.parent}: {why}" in shown, words


def test_what_is_written_is_what_the_name_says(plan: Plan, tmp_path: Path) -> None:
    path = small_trace(plan)
    told = pyalloc("report", path, "-o", tmp_path / "r.pdf", expect=2)
    assert "does not write .pdf, only text (.txt" in told and "a page (.html)" in told
    for command in ("top", "stats", "replay"):
        told = pyalloc(command, path, "-o", tmp_path / "r.html", expect=2)
        assert "does not write .html" in told and "page" not in told
    assert "asks for a page and --json for JSON" in pyalloc(
        "report", path, "--json", "-o", tmp_path / "r.html", expect=2
    )
    assert not list(tmp_path.glob("r.*"))
    pyalloc("report", path, "-o", tmp_path / "r.HTM", "-q")
    assert (tmp_path / "r.HTM").read_text().startswith("<!doctype html>")
    pyalloc("top", path, "-o", tmp_path / "r.json", "-q")
    assert json.loads((tmp_path / "r.json").read_text())["at"] == "peak"
    pyalloc("top", path, "-o", tmp_path / "r", "-q")
    assert (tmp_path / "r").read_text().startswith("at the peak")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_sweep_that_is_ended_leaves_no_worker_behind(
    plan: Plan, tmp_path: Path, number: signal.Signals
) -> None:
    path = small_trace(plan)
    worker = tmp_path / "worker"
    program = tmp_path / "program.py"  # workers that are not forked import it: from Python 3.14 on
    program.write_text(f"""
import sys, time
from pyalloc import cli, sweeping
def stay(point):
    with open({str(worker)!r}, "w") as file:
        file.write("here")
    time.sleep(0.5)
    return {{}}
sweeping.run_point = stay
if __name__ == "__main__":
    sys.exit(cli.main(["sweep", {str(path)!r}, *["--conf", "memory:tight"] * 40, "--workers", "2"]))
""")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    child = subprocess.Popen(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: worker.exists() and worker.read_text(), child)
    child.send_signal(number)
    _, told = child.communicate(timeout=PATIENCE_S)  # until the last one that writes there is gone
    assert child.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert b"Traceback" not in told, told
    # Python's own, of where its workers are forked (3.14): nobody is left to remove it.
    left = [each.name for each in temporary.iterdir()]
    assert all(number == signal.SIGKILL and name.startswith("pymp-") for name in left), left


def with_a_full_disk(temporary: Path, *words: object) -> str:
    """What `pyalloc ...` says of it."""
    done = subprocess.run(
        # -B: Python would leave compiled modules that are cut off, and every later import would fail.
        [sys.executable, "-B", "-m", "pyalloc", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_full_disk_while_unpacking_is_told_with_where_that_is(plan: Plan, tmp_path: Path) -> None:
    packed = tmp_path / "plan.pya.xz"
    packed.write_bytes(lzma.compress(small_trace(plan).read_bytes()))
    told = f"plan.pya.xz: while unpacking it in {tmp_path}: File too large; TMPDIR chooses another"
    assert told in with_a_full_disk(tmp_path, "stats", packed)


def test_a_full_disk_while_a_file_is_written_again_is_told_of_that_file(
    plan: Plan, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshot.pickle"
    pyalloc("export", small_trace(plan), "--to", "torch", "-o", snapshot)
    for path, words in ((snapshot, ["stats"]), (plan.path, ["export", "--to=csv", "--no-source"])):
        told = f"{path}: File too large (while writing a copy in {tmp_path}; TMPDIR chooses another folder)"
        assert with_a_full_disk(tmp_path, *words, path) == f"pyalloc {words[0]}: {told}\n"
    for told in ("elsewhere: no room", f"{snapshot}: more than there is"):  # by what reads it
        with pytest.raises(TraceError) as caught, trace.as_trace_file(snapshot) as written:
            raise TraceError(told.replace(str(snapshot), str(written)))
        assert str(caught.value) == told
    snapshot.write_bytes(
        pickle.dumps(
            {"segments": [{"address": 1, "total_size": 1, "blocks": [], "segment_pool_id": 7}]}
        )
    )
    assert f"{snapshot}: the snapshot is malformed" in pyalloc("stats", snapshot, expect=2)


def test_output_that_cannot_be_written_or_spelled(plan: Plan) -> None:
    path = small_trace(plan)
    command = [sys.executable, "-m", "pyalloc"]
    plain = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:strict"}
    plain.pop(
        "PYTHONUNBUFFERED", None
    )  # as it is for most: written when the command ends, or asks for it
    done = subprocess.run([*command, "report", path], env=plain, capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout.isascii() and b"at the peak" in done.stdout
    timeline = done.stdout.split(b"[", 1)[1].split(b"]", 1)[0]
    assert {b" ", b"@"} <= {timeline[i : i + 1] for i in range(len(timeline))}, timeline
    for words in (["report", path], ["top", path], ["--help"], ["doctor"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*command, *words], env=plain, stdout=full, stderr=subprocess.PIPE, check=False
            )
        assert done.returncode == 2, words
        assert b": No space left" in done.stderr and done.stderr.count(b"\n") == 1, done.stderr
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [*command, *words], env=plain, stdout=writing, stderr=subprocess.PIPE, check=False
        )
        os.close(writing)
        assert done.returncode == 141, words
        assert b"rror" not in done.stderr, done.stderr


@pytest.mark.parametrize("closed", [1, 2])
def test_streams_that_are_closed(plan: Plan, closed: int) -> None:
    path = small_trace(plan)
    for words in (["report", path], ["--help"], ["run", "python", "-c", ""]):
        done = subprocess.run(
            [sys.executable, "-m", "pyalloc", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: os.close(closed),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr


def test_files_with_long_names(plan: Plan, tmp_path: Path) -> None:
    path = small_trace(plan)
    names = [f"experiment_large_model_batch_{i}_seed_1_of_12.pya" for i in (64, 128)]
    for name in names:
        shutil.copy(path, tmp_path / name)
    for words in (["report", names[0], "--no-replay"], ["diff", *names]):
        out = pyalloc(*words, "-q", cwd=tmp_path)
        assert max(map(len, out.splitlines())) <= 80
        assert names[0] in out  # in one piece

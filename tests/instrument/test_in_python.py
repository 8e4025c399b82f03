"""Recordings read by a user's own programs."""

from __future__ import annotations

import gzip
import json
import re
import time
from dataclasses import fields
from pathlib import Path

import pytest

from instrument.tools import MIB, ROOT, Plan, pyalloc, small_trace
from pyalloc import reading
from pyalloc.errors import TraceError
from pyalloc.outside.dryrun import Result


def test_events_of_a_trace(plan: Plan, tmp_path: Path) -> None:
    packed = tmp_path / "plan.pya.gz"
    packed.write_bytes(gzip.compress(small_trace(plan).read_bytes()))
    for path in (plan.path, str(plan.path), packed):
        first, step, phase, alloc, other, *_ = reading.events(path)
        line = (("work", "/home/me/model.py", 3),)
        assert first == (0, "segment_alloc", 0, 1000, 0, 0, 1 << 30, 20 * MIB, 0, line, "")
        assert (step.kind, step.arg, step.text) == ("step", 0, "step")
        assert (phase.kind, phase.text) == ("phase_begin", "forward")
        assert (alloc.bytes, alloc.time_ns) == (4 * MIB, 4000) and alloc.stack is first.stack
        assert other.stack == (("work", "/home/me/model.py", 4),)
        found = list(reading.events(path))
        assert [event.number for event in found] == list(range(len(found)))
        assert {event.kind for event in found} <= set(reading.MEANINGS)
        assert found[-1].bytes == MIB


def test_progress_is_told_of_and_what_is_no_recording_refused(plan: Plan, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    list(reading.events(small_trace(plan), lambda done, total: told.append((done, total))))
    assert told and told[-1][0] == told[-1][1]
    other = tmp_path / "other.pya"
    other.write_text("no trace")
    for path in (other, tmp_path / "missing.pya"):
        with pytest.raises(TraceError, match=path.name):
            list(reading.events(path))


@pytest.mark.torch
def test_times_and_threads_are_those_of_the_system(forum: Path) -> None:
    events = [event for event in reading.events(forum) if event.kind == "alloc"]
    times = [event.time_ns for event in events]
    assert times == sorted(times) and 0 < time.time_ns() - times[-1] < 24 * 3600 * 10**9
    assert all(event.stack for event in events[:100])


@pytest.mark.torch
def test_the_documents_example(
    forum: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "recording.md").read_text()
    (code,) = re.findall(r"```python\n(from pyalloc import reading.*?)```", text, re.DOTALL)
    (tmp_path / "out.pya").symlink_to(forum)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    out = capsys.readouterr().out
    assert "seq2seq.py" in out and "AdditiveAttention" in out


def told_keys(command: str) -> tuple[list[str], list[str]]:
    """From the documents' table: the fields of the answer, and of the things it has several of."""
    text = (ROOT / "docs" / "recording.md").read_text()
    (told,) = re.findall(rf"^\| `pyalloc {re.escape(command)}` \| (.*) \|$", text, re.MULTILINE)
    within = re.findall(r"\((?:a list of|for each) ([^)]*)\)", told)
    outside = re.sub(r"\([^)]*\)", "", told)
    return re.findall(r"`(\w+)`", outside), re.findall(r"`(\w+)`", " ".join(within[:1]))


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("report", ()),
        ("stats", ()),
        ("top", ()),
        ("events", ()),
        ("diff", ()),
        ("replay", ("--find-min",)),
    ],
)
def test_the_documents_keys(plan: Plan, command: str, options: tuple[str, ...]) -> None:
    found = json.loads(pyalloc(command, small_trace(plan), *options, "--json", "-q"))
    keys, within = told_keys(command)
    assert keys and set(keys) <= set(found)
    several = {"top": "rows", "events": "rows", "replay": "policies", "report": "advice"}
    if command in several:
        first = found[several[command]]
        assert set(within) <= set(next(iter(first.values() if command == "replay" else first)))


def test_the_documents_keys_of_dry_runs() -> None:
    keys, _ = told_keys("dryrun --json FILE")
    assert keys and set(keys) <= {field.name for field in fields(Result)}

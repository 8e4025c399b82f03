"""What commands say: names, the next command, what a trace lacks, 80 columns."""

from __future__ import annotations

import json
import lzma
import pickle
import re
import sys
import unicodedata
from pathlib import Path

import pytest

from instrument.tools import MIB, ROOT, Plan, pyalloc, small_trace
from pyalloc import _core, cli, trace
from pyalloc.cli import report as report_command
from pyalloc.common import console
from pyalloc.common.config import Config
from pyalloc.report.text import explain_oom, sparkline, summary
from pyalloc.traces import source


def test_scalars_are_of_the_smallest_size_class(plan: Plan) -> None:
    plan.event("alloc", addr=1 << 24, bytes=512, stack=plan.stack(1))
    plan.event("alloc", addr=1 << 25, bytes=1536, stack=plan.stack(1))
    found = trace.analyse(plan.done())
    names = [row.name for row in found.by_size(found.peak.blocks)]
    assert names == ["up to 2 KiB", "up to 1 KiB"]


def test_the_line_of_a_program_given_as_text() -> None:
    made_by_a_library = ("__init__", "<string>", 3)
    internal = ("forward", "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 9)
    found = source.place((internal, made_by_a_library, ("<module>", "<string>", 1)))
    assert found is not None and (found.file, found.line) == ("<string>", 1)
    found = source.place((made_by_a_library, internal, ("main", "<stdin>", 2)))
    assert found is not None and (found.file, found.line) == ("<stdin>", 2)


def test_the_line_of_a_compiled_program_is_not_that_of_its_generated_code() -> None:
    name = "c4kuvi32oiqvhad5gq3lwv2pmgil6dfrl33lnanu7xi7ygjokyrm.py"
    written = [f"{cache}/{name}" for cache in ("/tmp/torchinductor_me/4k", "/my/cache/4k")]
    for file in (*written, "/tmp/torch_geometric.nn.conv.gcn_conv_GCNConv_propagate_t9o0_hqh.py"):
        found = source.place((("call", file, 807), ("forward", "/home/me/train.py", 33)))
        assert found is not None and str(found) == "me/train.py:33 forward"
    # backward() calls it without a line of the program.
    found = source.place((("call", written[0], 807),))
    assert str(found) == "torch.compile/c4kuvi32.py:807 call"
    torch = "/env/lib/python3.11/site-packages/torch"
    run = (("__call__", f"{torch}/_ops.py", 916), ("forward", "<eval_with_key>.5", 16))
    wrapper = f"{torch}/_functorch/_aot_autograd/runtime_wrappers.py"
    found = source.place((*run, ("backward", wrapper, 3552)))  # backend="aot_eager"
    assert str(found) == "torch.compile/graph.5:16 backward"
    assert str(source.place(run)) == "torch.compile/graph.5:16 forward"
    found = source.place((*run, ("main", "/home/me/train.py", 3)))
    assert str(found) == "me/train.py:3 main"


def test_what_was_there_before_is_no_gradient_of_what_came_after(plan: Plan) -> None:
    plan.event("alloc", addr=1 << 30, bytes=4 * MIB)  # as when a recording begins, without a stack
    plan.event("alloc", addr=2 << 30, bytes=4 * MIB, stack=plan.stack(7))
    path = plan.done()
    assert "(no stack)" in pyalloc("top", path) and "gradient" not in pyalloc("top", path)


def test_what_comes_without_a_stack_after_its_like_may_be_its_gradient(plan: Plan) -> None:
    plan.event("alloc", addr=2 << 30, bytes=4 * MIB, stack=plan.stack(7))
    plan.event("alloc", addr=1 << 30, bytes=4 * MIB)
    told = " ".join(pyalloc("top", plan.done()).split())
    assert "gradient of the tensor made at me/model.py:7 work (same size)" in told


def test_figures_of_one_device_are_not_beside_replays_of_all(plan: Plan) -> None:
    for device in (0, 1):
        plan.event("alloc", addr=(device + 1) << 30, bytes=8 * MIB, device=device)
    path = plan.done()
    assert json.loads(pyalloc("report", path, "--json", "-q"))["replay"]
    assert not json.loads(pyalloc("report", path, "--json", "-q", "--device", "1"))["replay"]
    told = pyalloc("replay", path, "--find-min")
    assert " --devices 2 " in told
    assert "limit or smallest memory is that of each device" in " ".join(told.split())


def test_what_cannot_be_replayed_is_reported_without(plan: Plan) -> None:
    """There a program has at most 4096 streams."""
    path = on_streams(plan, 4097)
    told = pyalloc("report", path)
    assert f"pyalloc report: the report has no replays: {path}: more than 4096 streams or" in told
    assert "peak allocated 4.00 GiB" in told
    assert (
        json.loads(pyalloc("report", path, "--json", "-q").partition("\n}")[0] + "}")["replay"]
        == {}
    )
    for command in ("replay", "plan"):
        assert "more than 4096 streams or" in pyalloc(command, path, expect=2)


def test_many_streams_are_replayed_and_planned(plan: Plan, tmp_path: Path) -> None:
    """As many as a program has in torch's own pools of streams, on several devices, and more."""
    path = on_streams(plan, 300)
    replayed = json.loads(pyalloc("replay", path, "--json", "-q"))["policies"]
    assert replayed["native"]["peak_bytes"] == 300 * 2 * MIB
    assert replayed["expandable"]["peak_bytes"] == 300 * 2 * MIB
    assert replayed["pyalloc"]["completed"]
    assert "wrote" in pyalloc("plan", path, "-o", tmp_path / "some.plan")


def on_streams(plan: Plan, n: int) -> Path:
    """A block on each of so many streams."""
    for i in range(n):
        plan.event("alloc", addr=(i + 1) << 30, bytes=MIB, stream=i)
    return plan.done()


def test_the_next_command_can_be_typed(plan: Plan) -> None:
    found = trace.analyse(small_trace(plan))
    told = explain_oom(found, 0, MIB, Path("/runs/one run/out.pya"))
    assert told.endswith("next: pyalloc report '/runs/one run/out.pya'")


def test_the_next_command_has_the_settings_of_the_replay(plan: Plan, tmp_path: Path) -> None:
    """Without its plan a program did not fit into the smallest memory that was found with it."""
    path, made = small_trace(plan), tmp_path / "a plan"
    pyalloc("plan", path, "-o", made)
    assert pyalloc("replay", path).endswith(f"next: pyalloc replay {path} --find-min\n")
    typed = ("--policy", "pyalloc", "--conf", "memory:tight", "--plan", made)
    told = pyalloc("replay", path, *typed, "--passes", "2").splitlines()[-1]
    settings = f"--policy pyalloc --conf memory:tight --plan '{made}' --passes 2"
    assert told == f"next: pyalloc replay {path} --find-min {settings}"
    told = pyalloc("replay", path, *typed, "--find-min").splitlines()[-1]
    assert told.startswith("next: PYALLOC_CONF=memory:tight pyalloc dryrun --memory ")
    assert f"MiB --allocator pyalloc --plan '{made}' python " in told
    assert "\nnext: pyalloc dryrun --memory " in pyalloc("replay", path, "--find-min")
    told = pyalloc("replay", path, "--conf", "memory:tight", "--find-min").splitlines()[-1]
    assert ("PYALLOC_CONF" in told) == ("--allocator pyalloc" in told)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("python -u /my/train.py --name 'a b'", "python -u /my/train.py --name 'a b'"),
        ("python -W ignore -uX dev train.py -W x", "python -W ignore -uX dev train.py -W x"),
        ("python -Wignore train.py", "python -Wignore train.py"),
        ("python3.14t train.py", "python3.14t train.py"),
        ("python -X train.py", "python your_script.py"),
        ("python train.py ; reboot", "python train.py ';' reboot"),
        ("python train.py; reboot", "python your_script.py"),
        ("reboot train.py", "python your_script.py"),
        ("python -m train.py", "python your_script.py"),
        ("python train.py 'a", "python your_script.py"),
        ("", "python your_script.py"),
    ],
)
def test_the_program_of_a_recording_is_named_in_the_next_command(command: str, told: str) -> None:
    """Only a script of the user's own: recordings come from others too."""
    assert console.program({"command": command}) == told
    script = "train.py" + told.partition("train.py")[2] if "train.py" in told else "your_script.py"
    script = "/my/" * ("/my/" in told) + script
    for size, start in (("4", "torchrun --nproc-per-node 4"), ("64", "torchrun")):
        ranks = {"command": command, "rank": "1", "world_size": size}
        assert console.program(ranks) == f"{start} {script}"
    assert console.program({"command": command, "rank": "0", "world_size": "1"}) == told


def test_tables_of_names_in_wide_characters(plan: Plan) -> None:
    def columns(line: str) -> int:
        return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in line)

    names = ["forward", "\u524d\u5411\u4f20\u64ad", "\u8bad\u7ec3" * 20, "x" + "\u8bad\u7ec3" * 20]
    for i, name in enumerate(names):
        plan.event("phase_begin", name)
        plan.event("alloc", addr=(i + 1) << 30, bytes=MIB, stack=plan.stack(i, name=name))
        plan.event("phase_end", name)
    shown = summary(trace.analyse(plan.done()))
    assert max(map(columns, shown.splitlines())) <= 80 and "\0" not in shown
    rows = [line for line in shown.splitlines() if re.match(r" +-1  ", line)]
    assert len(rows) == 4 and len({columns(line) for line in rows}) == 1


def test_the_line_of_memory_shows_all_of_a_short_trace(plan: Plan) -> None:
    for i in range(9):
        plan.event("alloc", addr=(i + 1) << 30, bytes=MIB)
    cells = sparkline(trace.analyse(plan.done()))
    assert cells == "".join(sorted(cells)) and cells[-1] == "\N{FULL BLOCK}"


def test_of_ranks_those_without_memory_are_left_out(plan: Plan, tmp_path: Path) -> None:
    """A worker of torch.compile starts CUDA and allocates nothing."""
    path, worker = small_trace(plan), Plan(tmp_path / "out.123.pya").done()
    alone = pyalloc("report", path, "-q")  # with replays, which ranks that are compared do not have
    assert pyalloc("report", worker, path, "-q") == alone
    shown = pyalloc("report", worker, path, "-o", tmp_path / "page.html")
    assert alone in shown and "left out because they hold no allocation: out.123.pya\n" in shown


def test_the_smallest_memory_is_rounded_up_and_an_error_while_recording_is_told(plan: Plan) -> None:
    for i in range(1500):
        plan.event("alloc", addr=(i + 1) << 30, bytes=MIB)
    plan.event("oom", bytes=64 * MIB, arg=0)
    shown = pyalloc("replay", plan.done(), "--find-min", "--policy", "pyalloc")
    # 1.46 GiB would not be enough.
    assert re.search(r"smallest memory +completes .*\npyalloc +1,500 MiB +1,500 MiB", shown)
    assert "ran out of memory while it was recorded" in shown
    assert "A card also has to hold the CUDA context" in shown


def test_the_next_command_has_the_memory_and_devices_that_are_enough(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = {"native": (9, 9), "expandable": (7 * MIB - 1, 7 * MIB + 1), "pyalloc": (8 * MIB,) * 2}

    def find_min(_program: object, name: str, **_: object) -> dict[str, int]:
        enough, safe = least[name]
        return {"bytes": enough, "safe_bytes": safe, "margin_bytes": safe - enough}

    monkeypatch.setattr("pyalloc.replaying.find_min", find_min)
    for device in range(3):
        plan.event("alloc", addr=(device + 1) << 40, bytes=MIB, device=device)
    words = ("replay", plan.done(), "--find-min")
    shown = pyalloc(*words, "--policy", "expandable", "--policy", "pyalloc")
    assert re.search(r"\nexpandable +7 MiB +8 MiB .*\npyalloc +8 MiB +8 MiB +0 bytes\n", shown)
    assert "\nnext: pyalloc dryrun --memory 8MiB --devices 3 --allocator expandable " in shown
    helps = "More memory does not always help"
    assert helps in shown and "Peaks are sums over the devices' own peaks;" in shown
    assert helps not in pyalloc(*words, "--policy", "native", "--policy", "pyalloc")


def test_replay_says_when_nothing_fits(plan: Plan) -> None:
    path = small_trace(plan)
    out = pyalloc("replay", path, "--limit", "4MB", "-q", expect=1)
    assert "out of memory at operation" in out
    data = json.loads(pyalloc("replay", path, "--find-min", "--json", "-q"))
    assert {name for name, _ in _core.replay_policies()} == set(data["find_min"])
    twice = " ".join(pyalloc("replay", path, "--passes", "2", "-q").split())
    assert "last pass" in twice and "unlimited memory, replayed 2 times in a row policy" in twice
    assert "passes from 1 to 1000" in pyalloc("replay", path, "--passes", "0", "-q", expect=2)
    for name, least in data["find_min"].items():
        again = json.loads(
            pyalloc(
                "replay", path, "--policy", name, "--limit", str(least["bytes"]), "--json", "-q"
            )
        )
        assert again["policies"][name]["completed"]


def test_a_replay_says_what_its_trace_does_not_have(plan: Plan, tmp_path: Path) -> None:
    block = {"size": MIB, "requested_size": MIB, "state": "active_allocated"}
    segment = {"address": 1 << 30, "total_size": 2 * MIB, "stream": 0, "blocks": [block]}
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(pickle.dumps({"segments": [segment]}, protocol=4))
    packed = tmp_path / "snapshot.pickle.xz"
    packed.write_bytes(lzma.compress(snapshot.read_bytes()))
    for path in (snapshot, packed):
        told = " ".join(pyalloc("replay", path, "--find-min").split())
        assert "only what was in use when it was written" in told
    cut = small_trace(plan)
    assert json.loads(pyalloc("replay", cut, "--json", "-q"))["caveats"] == []
    cut.write_bytes(cut.read_bytes()[:-1])
    (caveat,) = json.loads(pyalloc("replay", cut, "--json", "-q"))["caveats"]
    assert caveat.startswith("The file was cut off")


def test_what_is_enough_for_several_passes(plan: Plan) -> None:
    """What the first one left cached is in the second one's way."""
    made = [(1, 6), (2, 6), (0, 2), (0, 1), (3, 3), (4, 1), (0, 4), (5, 14), (6, 1), (7, 11)]
    for number, size in made:
        if number:
            plan.event("alloc", addr=number << 32, bytes=size * MIB)
        else:  # the number of the one to free
            plan.event("free_requested", addr=size << 32)
    path = plan.done()
    words = ["replay", path, "--policy", "native", "--json", "-q"]
    least = [
        json.loads(pyalloc(*words, "--find-min", *passes))["find_min"]["native"]["safe_bytes"]
        for passes in ([], ["--passes", "2"])
    ]
    for size, code in zip(least, (1, 0), strict=True):
        pyalloc(*words, "--passes", "2", "--limit", size, expect=code)


def test_settings_that_a_replay_does_not_have_are_said(plan: Plan) -> None:
    plan.event(
        "user", "PYTORCH_ALLOC_CONF=expandable_segments:True,roundup_power2_divisions:[256:1,>:4]"
    )
    plan.event("user", "garbage_collection_threshold=0.8")  # as in a snapshot
    path = small_trace(plan)
    (caveat,) = json.loads(pyalloc("replay", path, "--json", "-q"))["caveats"]
    settings = "Recorded with roundup_power2_divisions, garbage_collection_threshold, which"
    assert caveat.startswith(settings) and "expandable segments do not model" in caveat
    assert settings in " ".join(pyalloc("report", path, "-q").split())  # beside what was replayed


def test_a_run_that_records_nothing_says_so(tmp_path: Path) -> None:
    """And only the process that was asked to record: others of the program may record too."""
    out = tmp_path / "out.pya"
    child = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', '']); {}"
    told = pyalloc("run", "--record", out, sys.executable, "-c", child.format(""))
    assert told.count("recorded nothing; no process used CUDA") == 1 and str(out) in told
    forked = child.format("os.fork() or sys.exit(); os.wait()")  # both leave in order
    assert pyalloc("run", "--record", out, sys.executable, "-c", forked).count("nothing") == 1
    made = child.format(f"open({str(tmp_path / 'out.rank1.pya')!r}, 'w')")
    assert "nothing" not in pyalloc("run", "--record", out, sys.executable, "-c", made)


def test_examples_in_the_help_are_right() -> None:
    """Each `--conf key:value` in a help text is a setting."""
    shown = [
        conf
        for name in cli.names()
        for conf in re.findall(r"--conf (\w+:\w+)", pyalloc(name, "--help"))
    ]
    assert "memory:tight" in shown
    for conf in shown:
        if conf.lower() != "key:value":
            Config(conf)


def test_what_a_setting_limits_is_not_ample(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 if nothing fits, whatever the limit."""
    path = str(small_trace(plan))
    limited = ["replay", path, "--conf", "limit:4MiB"]
    for words, code, told in (
        (
            [*limited, "--policy", "pyalloc"],
            1,
            "peak allocated 7.0 MiB; pyalloc limited to 4.0 MiB by --conf policy",
        ),
        ([*limited, "--policy", "pyalloc", "--find-min"], 1, "does not complete with any size"),
        (
            [*limited, "--policy", "pyalloc", "--limit", "1GB"],
            1,
            "peak allocated 7.0 MiB; 1GB of memory, pyalloc limited to 4.0 MiB by --conf policy",
        ),
        (
            limited,
            0,
            "peak allocated 7.0 MiB; unlimited memory, pyalloc limited to 4.0 MiB by --conf policy",
        ),
        (["replay", path, "--find-min"], 0, "peak allocated 7.0 MiB; unlimited memory policy"),
        (
            ["replay", path, "--policy", "native"],
            0,
            "peak allocated 7.0 MiB; unlimited memory policy",
        ),
    ):
        assert cli.main(words) == code, words
        out = capsys.readouterr().out
        assert told in " ".join(out.split()), words
        assert max(map(len, out.splitlines())) <= 80


def test_what_a_trace_does_not_tell_is_said(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_trace(plan)
    empty = Plan(tmp_path / "it's empty.pya").done()
    one = Plan(tmp_path / "one.pya")
    one.event("alloc", addr=1 << 30, bytes=MIB)
    cut = tmp_path / "cut.pya"
    cut.write_bytes(path.read_bytes()[:40])
    nothing = tmp_path / "nothing"
    nothing.touch()
    for words, code, text in (
        (["report", path, "--device", "7"], 2, "no memory of device 7, only of 0"),
        (["top", empty, "--device", "0"], 2, "nor of any other"),
        (["report", empty], 0, "It holds no allocation"),
        (["report", empty], 0, "next: pyalloc run --record out.pya python train.py"),
        (["top", empty], 0, "It holds no allocation"),
        (
            ["report", cut],
            0,
            "file was cut off; the figures are those of the part that is there. The part that is there holds",
        ),
        (["report", cut], 0, "holds no allocation, which says nothing about the program. If the"),
        (["top", cut], 0, "otherwise record again and let the program run longer"),
        (["top", empty], 0, "next: pyalloc run --record out.pya python train.py"),
        (["stats", empty], 0, "it'\"'\"'s empty.pya'"),  # works as typed
        (["replay", empty, "--find-min"], 2, "nothing to replay"),
        (["stats", nothing], 2, "the file is empty"),
        (["report", "."], 2, ". is a folder; name a file in it"),
        (["report", path, "-o", tmp_path / "no" / "where.html"], 2, "there is no folder"),
        (["report", path, "-o", tmp_path], 2, "not a regular file"),
        (["report", one.done()], 0, "no steps began"),
    ):
        assert cli.main([str(word) for word in words]) == code, words
        shown = "".join(capsys.readouterr())
        assert text in " ".join(shown.split()), shown
        assert (cut not in words) or "used no CUDA memory" not in shown
    for words in (["top", path, "-n", "-3"], ["sweep", path, "--workers", "-4"]):
        with pytest.raises(SystemExit):
            cli.main([str(word) for word in words])
        assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_of_two_ranks_the_larger_is_the_odd_one(tmp_path: Path) -> None:
    paths = []
    for name, size in (("a.pya", 1 << 20), ("b.pya", 3 << 20)):
        own = Plan(tmp_path / name)
        own.event("alloc", addr=1 << 20, bytes=size, stack=own.stack(1))
        paths.append(own.done())
    out = pyalloc("report", *paths, "-q")
    assert "the odd one is b.pya; at the peak, compared with a.pya:" in out


def test_a_report_on_nothing_has_no_tables_without_rows(plan: Plan) -> None:
    """As of a program that ended before it used the device."""
    plan.event("user", "torch=2.14.1")
    plan.event("step", "step")
    out = pyalloc("report", plan.done(), "-q")
    assert "It holds no allocation" in out and "torch=2.14.1" in out
    for words in ("at the peak", "by line", "peak allocated", "leak"):
        assert words not in out


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ((), *((name, "--help") for name in cli.names())):
        for line in pyalloc(*words).splitlines():
            assert len(line) <= 80, line


def test_a_command_with_a_configuration_in_it_is_cut(plan: Plan) -> None:
    plan.event("user", f"command=python train.py --config {'x' * 4000}")
    shown = pyalloc("report", small_trace(plan), "--no-replay", "-q")
    assert "python train.py --config" in shown and "…" in shown and "x" * 400 not in shown
    told = explain_oom(trace.analyse(plan.path), 0, MIB, plan.path)
    assert "python train.py --config" in told and "…" in told and "x" * 400 not in told


def test_requests_of_backward_are_told_from_others_without_a_stack(plan: Plan) -> None:
    """Over the whole run too, where there is no block to ask."""
    for i, phase in enumerate(("", "backward", "forward", "backward")):
        if phase:
            plan.event("phase_begin", phase)
        plan.event("alloc", addr=(i + 1) << 30, bytes=(1 << i) * MIB)
        if phase:
            plan.event("phase_end", phase)
        plan.event("free_requested", addr=(i + 1) << 30) if i == 1 else None
    frame = plan.writer.string("torch::autograd::Engine::thread_main(std::shared_ptr<>)")
    engine = plan.writer.stack(0, frame, plan.writer.string("/x/libtorch_cpu.so"), 0)
    plan.event("alloc", addr=9 << 30, bytes=16 * MIB, stack=engine)
    content = json.loads(pyalloc("top", plan.done(), "--over-time", "--json", "-q"))
    found = [
        (row["name"], *(row[key] for key in ("bytes", "requests", "live_bytes")))
        for row in content["lines"]
    ]
    assert found == [
        ("backward (no Python stack)", 26 * MIB, 3, 24 * MIB),
        ("(no stack)", 5 * MIB, 2, 5 * MIB),
    ]


def test_output_fits_80_columns(plan: Plan) -> None:
    path = small_trace(plan)
    for words in (["report"], ["replay", "--find-min"], ["top"], ["top", "--over-time"], ["diff"]):
        out = pyalloc(words[0], path.name, *words[1:], "-q", cwd=path.parent)
        for line in out.splitlines():
            assert len(line) <= 80, line
    assert (ROOT / "pyalloc").is_dir()


def test_a_leak_in_a_function_of_a_long_name_fits_80_columns(plan: Plan) -> None:
    stack = plan.stack(
        7, "TextClassificationTrainer.train_for_one_epoch", "/me/finetuning/trainer.py"
    )
    for step in range(8):
        plan.event("step", "step", arg=step)
        plan.event("alloc", addr=(step + 1) << 30, bytes=1 << 20, stack=stack)
    path = plan.done()
    for words in (["report"], ["top", "--over-time"], ["diff"]):
        out = pyalloc(words[0], path, *words[1:], "-q", expect=words == ["diff"])
        assert "leak: 1.00 MiB more" in out and all(len(line) <= 80 for line in out.splitlines())


def test_a_snapshot_without_history_and_stacks_has_no_timeline_and_no_lines(plan: Plan) -> None:
    plan.event("user", "history=none")
    plan.event("alloc", addr=1 << 30, bytes=8 * MIB)
    told = pyalloc("report", plan.done())
    assert "peak allocated 8.0 MiB\n\nat the peak, by contributor" in told
    assert told.endswith(f"next: pyalloc top {plan.path} --by size\n")


def test_what_a_report_proposes_next(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(8):
        plan.event("step", "step", arg=step)
        for i in range(2):
            plan.event("alloc", addr=(i + 1) << 30, bytes=8 * MIB, stack=plan.stack(i))
        for i in range(2):
            plan.event("free_requested", addr=(i + 1) << 30)
    found = trace.analyse(plan.done())
    begin = f"pyalloc {{}} {plan.path}"
    assert report_command._next(found) == begin.format("top") + " --by line"
    found.replays = {
        name: {"peak_bytes": n * MIB, "completed": True}
        for name, n in (("native", 90), ("expandable", 90), ("pyalloc", 16))
    }
    assert report_command._next(found) == begin.format("replay") + " --find-min"
    found.replays = {}
    monkeypatch.setattr(report_command, "_REPLAY_OPERATIONS", found.totals["n_events"])
    assert report_command._next(found) == begin.format("top") + " --by line"
    monkeypatch.setattr(report_command, "_REPLAY_OPERATIONS", found.totals["n_events"] - 1)
    assert report_command._next(found) == begin.format("replay")  # it was not replayed


@pytest.mark.parametrize(("every", "n_bytes"), [(1, MIB // 8), (3, 8 * MIB)])
def test_a_report_of_what_grows_proposes_to_look_over_time(
    plan: Plan, every: int, n_bytes: int
) -> None:
    for step in range(10):
        plan.event("step", "step", arg=step)
        if step % every == 0:
            plan.event("alloc", addr=(step + 1) << 30, bytes=n_bytes, stack=plan.stack(3))
    found = trace.analyse(plan.done())
    assert report_command._next(found) == f"pyalloc top {plan.path} --over-time"

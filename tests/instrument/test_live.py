"""Figures of a running process, and sweeps."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dry_support import PATIENCE_S, RunPython, python_for, run_checked, wait_until

from instrument.tools import MIB, ROOT, Plan, pyalloc, small_trace
from pyalloc import cli, live, sweeping
from pyalloc.errors import ConfigError, UsageError


@pytest.mark.torch
@pytest.mark.parametrize("install", [False, True], ids=["native", "pyalloc"])
def test_looking_again_and_again_lets_go_of_nothing(dry_python: RunPython, install: bool) -> None:
    out = dry_python(
        """
        import sys
        import torch
        from pyalloc.inside import snapshots
        torch.zeros(1, device="cuda")
        snapshots.segments()
        before = sys.getrefcount(False), sys.getrefcount(0)
        for _ in range(100):
            assert snapshots.segments()
        after = sys.getrefcount(False), sys.getrefcount(0)
        print(all(b > a - 50 for a, b in zip(before, after)))
        """,
        install=install,
    ).stdout
    assert out.split() == ["True"]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("allocator", "history"),
    [("native", "no"), *itertools.product(["native", "pyalloc"], ["history", "recorded"])],
)
def test_stats_and_live_of_a_running_process(tmp_path: Path, allocator: str, history: str) -> None:
    script = tmp_path / "program.py"
    source = (
        "import sys, torch, pyalloc.live\n"
        "if 'history' in sys.argv:\n"
        "    torch.cuda.memory._record_memory_history(stacks='python')\n"
        "more = torch.empty(2 << 20, dtype=torch.uint8, device='cuda')\n"
        "x = torch.empty(46 << 20, dtype=torch.uint8, device='cuda')\n"
        "assert pyalloc.live.serve()\n"
        "print('ready', __import__('os').getpid(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    script.write_text(source)
    dryrun = [sys.executable, "-m", "pyalloc", "dryrun", "--devices", "2", "--allocator", allocator]
    record = ["--record", str(tmp_path / "out.pya")] if history == "recorded" else []
    python = python_for(source, dryrun=True)
    words = [*dryrun, *record, python, "-W", "ignore", str(script), history]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdin is not None
    try:
        pid = int(child.stdout.readline().split()[1])
        assert live.socket_path(pid).stat().st_mode & 0o77 == 0
        data = json.loads(pyalloc("stats", pid, "--json", "-q"))
        assert data["devices"]["0"]["allocated_bytes.all.current"] == 48 * MIB
        assert list(data["devices"]) == ["0"]  # looking at the other would begin to use it
        assert ("pyalloc_growths" in data["devices"]["0"]) == (allocator == "pyalloc")
        assert ("device 0: pyalloc_growths" in pyalloc("stats", pid)) == (allocator == "pyalloc")
        out = pyalloc("live", pid, "--count", "2", "--interval", "0.01")
        assert out.count("allocated 48.0 MiB") == 2
        assert "lines" not in data
        shown = " ".join(pyalloc("live", pid, "--count", 1, "--lines", 1).split())
        told = json.loads(
            pyalloc("live", pid, "--count", 1, "--lines", 1, "--json").splitlines()[0]
        )
        if history == "no":
            assert told["lines"] is None and "it is unknown which lines hold the memory" in shown
        else:
            first = f"{tmp_path.name}/program.py:5 <module>"
            assert told["lines"] == [
                {"name": first, "bytes": 46 * MIB, "blocks": 1},
                {"name": "1 more", "bytes": 2 * MIB, "blocks": 1},
            ]
            assert (
                f"held now, by line 46.0 MiB 95.8 % 1 x {first} 2.0 MiB 4.2 % 1 x 1 more" in shown
            )
        assert (f"recorded to {tmp_path / 'out.pya'}" in out) == (history == "recorded")
        names = ("argv", "recorded to")  # lines with a file's name stay in one piece
        wide = [line for line in out.splitlines() if len(line) > 80]
        assert not [line for line in wide if not any(name in line for name in names)]
    finally:
        child.stdin.close()
        child.wait(timeout=PATIENCE_S)
        child.stdout.close()
    wait_until(lambda: not live.socket_path(pid).exists())
    assert pyalloc("stats", pid, expect=2) == f"pyalloc stats: there is no process {pid}\n"
    assert "-n is for files; of process" in pyalloc("stats", pid, "-n", 3, expect=2)
    assert "cannot be watched yet: run `pyalloc attach " in pyalloc("stats", os.getpid(), expect=2)


def test_a_dry_runs_own_code_is_no_line_that_holds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = {"name": "call", "filename": "/x/pyalloc/_bootstrap/following.py", "line": 472}
    block = {"state": "active_allocated", "size": 512, "frames": [frame]}
    monkeypatch.setattr(live.snapshots, "segments", lambda: [{"blocks": [block]}])
    held = {"name": "backward (no Python stack)", "bytes": 512, "blocks": 1}
    assert live._lines(1) == [held]


@pytest.mark.torch
def test_who_asks_for_lines_does_not_make_the_program_import_the_compiler(
    dry_python: RunPython,
) -> None:
    """It takes longer than a client waits."""
    dry_python(
        """
        import sys, torch
        torch.cuda.memory._record_memory_history(stacks="python")
        x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        from pyalloc import live
        assert [line["blocks"] for line in live.figures(1)["lines"]] == [1]
        assert "torch._inductor" not in sys.modules
        """
    )


def test_sockets_of_killed_processes_go_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    left, young, alive = (live.socket_path(number) for number in (1, 2, 3))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(alive))
    listener.listen(1)
    for path in (left, young):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    for path in (left, alive):
        os.utime(path, (0, 0))
    with pytest.raises(UsageError) as caught:
        live.ask(os.getppid())
    code = str(caught.value).split("`")[-2]  # what the error says to run
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert not left.exists() and young.exists() and alive.exists()
    assert len(list(tmp_path.iterdir())) == 2  # its own went with it
    listener.close()


def test_processes_answer_where_the_folder_of_the_login_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    served = live.serve()
    assert served is not None and served.parent == tmp_path
    (tmp_path / "login").mkdir()
    for folder in ("gone", "login", ""):  # a client may have one
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / folder) if folder else "")
        assert live.ask(os.getpid())["pid"] == os.getpid()


@pytest.mark.parametrize("name", ["TMPDIR", "TMP", "XDG_RUNTIME_DIR"])
def test_a_process_is_found_where_its_own_environment_says(tmp_path: Path, name: str) -> None:
    """A batch system gives each job its own temporary folder, and the client has another."""
    variables = {key: text for key, text in os.environ.items() if key != "XDG_RUNTIME_DIR"}
    code = "from pyalloc import live; print(live.serve(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**variables, name: str(tmp_path)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert Path(child.stdout.readline().strip()).parent == tmp_path
        assert live.ask(child.pid)["pid"] == child.pid
        child.communicate("\n")


def test_a_process_is_found_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that found a socket which did not listen yet reported a process that never would."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = live.socket_path(os.getpid())
    found: list[tuple[bool, bool]] = []

    class Socket(socket.socket):
        def listen(self, *given: int) -> None:
            found.append((path.exists(), len(self.getsockname()) > len(str(path))))
            super().listen(*given)

    monkeypatch.setattr(live.socket, "socket", Socket)
    assert live.serve() == path and found == [(False, False)]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_process_that_does_not_answer_is_told_from_one_that_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(live, "_TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(live.socket_path(os.getpid())))
        listener.listen()
        with pytest.raises(live.BusyError, match="has not answered for"):
            live.ask(os.getpid())


def test_a_process_that_ends_while_it_is_asked_is_told_to_have_ended(tmp_path: Path) -> None:
    code = "import os; from pyalloc import live; live._attend = lambda *_: os._exit(0)\n"
    code += "print(live.serve(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        with pytest.raises(UsageError, match=f"process {child.pid} has ended in the meantime"):
            live.request(child.pid, {"attach": "end"}, PATIENCE_S)
        with pytest.raises(UsageError, match=f"process {child.pid} has ended$"):
            live.ask(child.pid)  # nobody has waited for it yet


def test_live_takes_no_odd_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("-1", "soon", "nan"):
        with pytest.raises(SystemExit):
            cli.main(["live", "1", f"--interval={wrong}"])
        assert "number of seconds" in capsys.readouterr().err


def test_the_end_of_a_process_is_no_line_among_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor has it ended if it does not answer for a while: it may be stopped."""
    answers: list[dict[str, object] | UsageError] = [
        {"pid": 7, "devices": {}},
        live.BusyError("it is stopped"),
        {"pid": 7, "devices": {}},
        UsageError("it has ended"),
    ]

    def ask(pid: int, n_lines: int) -> dict[str, object]:
        answer = answers.pop(0)
        if isinstance(answer, UsageError):
            raise answer
        return answer

    monkeypatch.setattr(live, "ask", ask)
    assert cli.main(["live", "7", "--json", "--interval", "0"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["pid"] for line in out.splitlines()] == [7, 7] and not answers
    assert "process 7 has ended" in err


def program(plan: Plan) -> Path:
    for i in range(8):
        plan.event("alloc", addr=(i + 1) << 30, bytes=30 * MIB)
    return plan.done()


def test_stats_of_a_process_shows_the_sums_of_its_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: dict[str, Any] = {
        "num_ooms": 2,
        "allocated_bytes.all.current": 3 * MIB,
        "allocated_bytes.small_pool.current": MIB,
    }
    devices = {"0": told}
    monkeypatch.setattr(live, "ask", lambda pid: {"pid": pid, "devices": devices})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["stats", "12"]) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [
        ["device", "0:", "num_ooms", "2"],
        ["device", "0:", "allocated_bytes.all.current", f"{3 * MIB:,}", "3.0", "MiB"],
    ]
    assert err == "next: pyalloc live 12\n"
    devices.clear()
    assert cli.main(["stats", "12"]) == 0
    assert capsys.readouterr().out.split() == ["CUDA", "not", "used", "yet"]
    (tmp_path / "12").mkdir()  # a file of that name comes first
    assert cli.main(["stats", "12"]) == 2
    assert capsys.readouterr().err == "pyalloc stats: 12 is a folder; name a file in it\n"


def test_a_sweep_with_settings_fits_80_columns(plan: Plan) -> None:
    path = small_trace(plan)
    longer = "memory:fast,keep_free:100MB"
    out = pyalloc(
        "sweep", path, "--limit", "210MiB", "--conf", "memory:tight", "--conf", longer, "-q"
    )
    assert all(len(line) <= 80 for line in out.splitlines()), out
    assert "\n        memory:tight\n" in out and "memory:fast, keep_free:100MB" in out


def test_a_sweep_names_limits_as_they_were_typed(plan: Plan) -> None:
    limits = ("--limit", "4GB", "--limit", "4100MiB")
    out = pyalloc("sweep", small_trace(plan), *limits, "--policy", "native", "-q")
    assert [line.split()[2] for line in out.splitlines()] == ["limit", "4GB", "4100MiB"]


def test_sweep_on_cores(plan: Plan) -> None:
    path = program(plan)
    rows = json.loads(
        pyalloc(
            "sweep", path, "--limit", "100MB", "--limit", "1GB", "--workers", "2", "--json", "-q"
        )
    )
    assert len(rows) == 6
    assert {(row["policy"], row["limit"] // MIB): row["completed"] for row in rows} == {
        (policy, mib): mib == 1024
        for policy in ("native", "expandable", "pyalloc")
        for mib in (100, 1024)
    }
    assert pyalloc("sweep", path, "-q").count("240.0 MiB") == 3


def test_a_sweep_tells_of_a_gap_once_for_each_trace(plan: Plan) -> None:
    plan.event("user", "lost_events=11")
    plan.event("user", "gaps=7 and 9")
    path = small_trace(plan)
    told = "The recording has a gap: 11 events were lost between events 7 and 9,"
    out = " ".join(pyalloc("sweep", path, "--workers", "1", "-q").split())
    assert out.count(f"{path.name}: {told}") == 1
    rows = json.loads(pyalloc("sweep", path, "--workers", "1", "--json", "-q"))
    assert len(rows) == 3 and all(told in " ".join(row["caveats"]) for row in rows)


def test_the_service_listens_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies elsewhere under its name may be another user's, and only that user can remove it."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder in (shared, own):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    there = shared / f"pyalloc-{os.getuid()}-{os.getpid()}.sock"
    (there / "cannot be unlinked").mkdir(parents=True)
    assert live.serve() == own / there.name
    assert there.exists()


def test_who_cannot_listen_opens_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder whose name is too long for a socket's, as batch systems make them; Python would warn."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert live.serve() is None
    assert not list(folder.iterdir())


def test_the_end_of_a_forked_process_takes_no_socket_away(tmp_path: Path) -> None:
    done = run_checked(
        [
            sys.executable,
            "-c",
            "import os\n"
            "from pyalloc import live\n"
            "path, child = live.serve(), os.fork()\n"
            "assert child == 0 or (os.waitpid(child, 0)[1] == 0 and path.exists())\n"
            "print(path)\n",
        ],
        env={"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    (path,) = set(done.stdout.split())
    assert not Path(path).exists()  # with the process itself it goes


def test_the_service_is_private_and_other_threads_files_are_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may write a checkpoint just as somebody begins to attach to it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    set_mask = os.umask
    before = set_mask(0)
    monkeypatch.setattr(os, "umask", None)
    try:
        path = live.serve()
    finally:
        set_mask(before)
    assert path is not None and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_process_without_open_files_answers_once_it_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client waits meanwhile: the service goes on until its own socket is closed."""
    here, there = socket.socketpair()
    coming: list[Any] = [OSError(errno.EMFILE, "too many"), (there, None), OSError(errno.EBADF, "")]

    class Listener:
        def accept(self) -> Any:
            each = coming.pop(0)
            if isinstance(each, OSError):
                raise each
            return each

    monkeypatch.setattr(live.time, "sleep", lambda _seconds: None)
    here.sendall(b"0")
    live._answer_all(Listener())  # type: ignore[arg-type]
    assert not coming
    with here:
        assert json.loads(here.recv(1 << 16))["pid"] == os.getpid()


@pytest.mark.parametrize("within", [[], ["cuda"]])
def test_a_process_answers_whatever_it_is_at(
    monkeypatch: pytest.MonkeyPatch, within: list[str]
) -> None:
    """At the import of torch, or of the recording modules, with words of its own in place of its arguments."""
    torch = ModuleType("torch")
    for name in within:
        setattr(torch, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(
        sys.modules, "pyalloc.inside.attached", ModuleType("pyalloc.inside.attached")
    )
    monkeypatch.setattr(sys, "argv", [Path("train.py"), 3])
    here, there = socket.socketpair()
    here.sendall(b"5")
    live._answer(there)
    with here:
        assert json.loads(live.received(here))["argv"] == ["train.py", "3"]
    monkeypatch.setattr(live, "figures", None)
    here, there = socket.socketpair()
    here.sendall(b"5")
    live._answer(there)  # nothing is raised: it would be shown among what the program says
    with here:
        assert live.received(here) == b""


def test_a_sweep_of_nothing_is_empty() -> None:
    assert list(sweeping.on_cores([], None, lambda done, total: None)) == []


def test_a_sweep_that_fails_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    """What would be replayed after it is of no use: nobody gets it."""
    path, done = program(plan), []
    run_point = sweeping.run_point

    def counted(point: sweeping.Point) -> dict[str, object]:
        done.append(point)
        return run_point(point)

    monkeypatch.setattr(sweeping, "run_point", counted)
    monkeypatch.setattr(sweeping, "ProcessPoolExecutor", ThreadPoolExecutor)
    todo = sweeping.points([path], ["pyalloc"], [0], ["memory:none"])
    todo += sweeping.points([path], ["native"], [i * MIB for i in range(300, 400)], [""])
    with pytest.raises(ConfigError, match="memory"):
        sweeping.on_cores(todo, 1, lambda done, total: None)
    assert 1 <= len(done) < 100


def test_a_damaged_trace_takes_nothing_from_a_sweep(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, damaged = program(plan), tmp_path / "damaged.pya"
    damaged.write_bytes(bytes(100))
    files = [str(damaged), str(path)]
    assert cli.main(["sweep", *files, "--policy", "native", "--workers", "1", "-q"]) == 2
    out, complaint = capsys.readouterr()
    assert "plan.pya" in out and "240.0 MiB" in out and "damaged" not in out
    assert complaint.count("damaged.pya") == 1
    assert cli.main(["sweep", *files, "--policy", "native", "--workers", "1", "--json", "-q"]) == 2
    rows = json.loads(capsys.readouterr().out)
    assert ["error" in row for row in rows] == [True, False]
    assert "damaged.pya" in rows[0]["error"] and rows[0]["policy"] == "native"
    assert cli.main(["sweep", *files, str(tmp_path / "absent.pya")]) == 2
    out, complaint = capsys.readouterr()
    assert out == "" and "absent.pya: No such file" in complaint


def test_after_a_sweep_the_first_trace_that_can_be_replayed_is_next_as_it_was_typed(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = program(plan)
    monkeypatch.chdir(path.parent)
    Path("cut off.pya").write_bytes(path.read_bytes()[:20])
    Path("page.html").write_text("<html>")
    options = ["--policy", "native", "--workers", "1"]
    assert cli.main(["sweep", "page.html", "cut off.pya", path.name, *options]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"next: pyalloc replay {path.name} --find-min"
    assert told[1].startswith("pyalloc sweep: page.html: ")
    assert cli.main(["sweep", "page.html", *options]) == 2
    assert capsys.readouterr().err.startswith("next: pyalloc run --record ")


def test_a_sweep_begins_no_idle_workers(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    begun = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, n_workers: int, **options: Any) -> None:
            begun.append(n_workers)
            super().__init__(n_workers, **options)

    monkeypatch.setattr(sweeping, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5})  # of many cores
    todo = sweeping.points([program(plan)], ["native"], [1 << 30, 2 << 30, 3 << 30], [""])
    for n_points, asked, expected in ((1, None, 1), (3, None, 2), (3, 64, 3)):
        assert len(list(sweeping.on_cores(todo[:n_points], asked, lambda *_: None))) == n_points
        assert begun.pop() == expected


def killed(point: sweeping.Point) -> None:
    os._exit(9)


def test_a_worker_that_is_killed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan: Plan
) -> None:
    monkeypatch.setattr(sweeping, "run_point", killed)
    assert cli.main(["sweep", str(program(plan)), "--workers", "2"]) == 2
    assert "a worker was killed" in capsys.readouterr().err


def test_settings_of_a_sweep_vary_pyalloc_only() -> None:
    found = sweeping.points([Path("a.pya")], ["native", "pyalloc"], [0, 1], ["", "memory:tight"])
    assert [(point.policy, point.limit, point.conf) for point in found] == [
        ("native", 0, ""),
        ("native", 1, ""),
        ("pyalloc", 0, ""),
        ("pyalloc", 0, "memory:tight"),
        ("pyalloc", 1, ""),
        ("pyalloc", 1, "memory:tight"),
    ]


def test_sweep_without_dask_says_what_to_install(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dask", None)  # as where it is not installed
    assert cli.main(["sweep", str(program(plan)), "--dask", "tcp://127.0.0.1:1"]) == 2
    assert "pip install distributed" in capsys.readouterr().err


def test_sweep_on_a_real_cluster(plan: Plan) -> None:
    distributed = pytest.importorskip("dask.distributed", reason="pip install distributed")
    dask = pytest.importorskip("dask")
    path = program(plan)
    patient = {f"distributed.comm.timeouts.{what}": PATIENCE_S for what in ("connect", "tcp")}
    with (
        dask.config.set(patient),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
    ):
        todo = sweeping.points([path], ["native", "pyalloc"], [100 * MIB, 1024 * MIB], [""])
        rows = list(sweeping.on_dask(todo, cluster.scheduler_address, lambda done, total: None))
    assert [row["completed"] for row in rows] == [False, True, False, True]


def test_a_program_given_as_text_is_one_line_that_no_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"pid": 7, "argv": ["-c", "import torch\nprint('\x1b[2J')"], "devices": {}}
    monkeypatch.setattr(live, "ask", lambda *_: figures)
    assert cli.main(["live", "7", "--count", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["process 7: -c import torch print('?[2J')", "  has not used CUDA yet"]


def test_what_is_left_of_a_sweep_that_was_broken_off_is_not_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C had to wait for all replays: a second call, by the end of `with`, cancelled the first one's wish."""
    told = []

    class Pool(ProcessPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            told.append(cancel_futures)
            super().shutdown(wait, cancel_futures=cancel_futures)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeping, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(sweeping, "run_point", repr)
    with pytest.raises(KeyboardInterrupt):
        sweeping.on_cores([sweeping.Point("trace", "native", n) for n in range(9)], 2, interrupt)
    assert told == [True]

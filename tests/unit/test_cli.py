"""The command line without torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pyalloc
from pyalloc import cli
from pyalloc.common import console
from pyalloc.errors import UsageError
from pyalloc.install import NO_DEVICE
from pyalloc.outside import hostcuda, launching


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{pyalloc.__version__}\n"
    assert pyalloc.__version__[0].isdigit()


def test_run_without_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run"]) == 2
    assert "pyalloc run python train.py" in capsys.readouterr().err


def test_run_with_a_bad_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--conf", "memroy:tight", "python", "x.py"]) == 2
    assert "memory" in capsys.readouterr().err


def test_run_beside_another_allocator_of_torchs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the program's processes would fail, after whatever it does first."""
    monkeypatch.setattr(os, "execvpe", None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    assert cli.main(["run", "python", "x.py"]) == 3
    assert "PYTORCH_ALLOC_CONF sets backend:cudaMallocAsync" in capsys.readouterr().err


def test_run_passes_exit_code_arguments_and_settings(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import sys
        from pyalloc.cli import main
        code = "import os, sys; print(os.environ['PYALLOC_CONF'], sys.argv[1:]); sys.exit(7)"
        print("before")
        main(["run", "--conf", "memory:tight", sys.executable, "-c", code, "--flag", "x y"])
        """,
        expect=7,
    )
    assert done.stdout == "before\nmemory:tight ['--flag', 'x y']\n"


@pytest.mark.parametrize("is_script", [False, True])
@pytest.mark.parametrize(("held", "code"), [("shlex", -signal.SIGINT), ("selectors", 130)])
def test_an_interrupted_import_shows_no_traceback(
    held: str, code: int, is_script: bool, tmp_path: Path
) -> None:
    """shlex belongs to what is imported before the command begins, selectors to what it needs."""
    (tmp_path / f"{held}.py").write_text(
        "import signal, time\nprint('here', flush=True)\ntime.sleep(600)\n"
    )
    script = tmp_path / "pyalloc"
    script.write_text("import sys\nfrom pyalloc.cli import main\nsys.exit(main())\n")
    words = [script] if is_script else ["-m", "pyalloc"]
    path = os.pathsep.join([str(tmp_path), str(Path(pyalloc.__file__).parent.parent)])
    with subprocess.Popen(
        [sys.executable, *words, "stats", "gone.pya"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None and started.stdout.readline() == "here\n"
        started.send_signal(signal.SIGINT)
        assert (started.communicate()[1], started.returncode) == ("", code)


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`pyalloc run` in a process of its own."""
    command = [sys.executable, "-m", "pyalloc", "run", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_what_run_becomes_is_ended_by_a_closed_pipe() -> None:
    """Python ignores that signal, and SIGXFSZ; a program that replaces a process ignores what the process did."""
    command = "yes | head -n 1; echo ${PIPESTATUS[0]}; grep SigIgn /proc/$$/status"
    done = run("bash", "-c", command)
    *lines, ignored = done.stdout.splitlines()
    assert (lines, done.stderr) == (["y", "141"], "")
    assert not int(ignored.split()[1], 16) >> (signal.SIGXFSZ - 1) & 1


def test_an_empty_part_of_the_path_is_the_folder_where_the_program_starts(tmp_path: Path) -> None:
    """From `export PYTHONPATH=$PYTHONPATH:src` without one; programs then find modules there for no visible reason."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "beside.py").write_text("print('found')\n")
    script = tmp_path / "scripts" / "train.py"
    script.write_text("import beside\n")
    env = {**os.environ, "PYTHONPATH": f":{Path(pyalloc.__file__).parent.parent}"}
    plain = [sys.executable, "scripts/train.py"]
    assert subprocess.check_output(plain, env=env, cwd=tmp_path) == b"found\n"
    done = run(*plain, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


def test_a_broken_sitecustomize_of_the_program_keeps_nothing_away(tmp_path: Path) -> None:
    """Python reports it and goes on with the program."""
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('of the program')\n")
    path = os.pathsep.join([str(tmp_path), str(Path(pyalloc.__file__).parent.parent)])
    code = "import sys; print([finder.name for finder in sys.meta_path if hasattr(finder, 'name')])"
    done = run(sys.executable, "-c", code, env={**os.environ, "PYTHONPATH": path})
    assert done.stdout == "['torch', 'torch']\n" and "of the program" in done.stderr


@pytest.mark.parametrize("command", ["run", "dryrun"])
@pytest.mark.parametrize("option", ["--stacks=all", "--no-source", "--no-marks"])
def test_how_to_record_is_not_said_where_nothing_is(
    command: str,
    option: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After hours there would be no recording."""
    monkeypatch.setattr(os, "execvpe", None)
    assert cli.main([command, option, sys.executable, "-V"]) == 2
    assert "add --record out.pya" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "--record=out.pya", "--stacks=all", "--no-source", "python"], "contradict"),
        (["run", "python", "-I", "x.py"], "leave out -I"),
        (["attach", "1", "--stacks=all", "--no-source"], "contradict each other"),
        (["attach", "1", "--stop", "--no-marks"], "--stop only ends a recording"),
        (["replay", "out.pya", "--policy=native", "--conf=vmm:False"], "add --policy pyalloc"),
        (["sweep", "out.pya", "--policy=native", "--conf=vmm:False"], "add --policy pyalloc"),
        (["sweep", "out.pya", "--dask=tcp://a:1", "--workers=2"], "give one of --workers and"),
    ],
)
def test_what_would_be_left_undone_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execvpe", None)
    assert cli.main(words) == 2
    assert told in capsys.readouterr().err


def test_run_gives_a_module_its_own_options(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        "from pyalloc.cli import main; main(['run', '--conf', 'memory:tight', '-m', 'json.tool', '--help'])"
    )
    assert "json.tool" in done.stdout and "--sort-keys" in done.stdout


def test_doctor_asks_for_cuda_where_torch_has_none(run_python, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "torch.py").write_text("class version: cuda = None\n__version__ = '9.9.9+cpu'\n")
    path = os.pathsep.join([str(tmp_path), str(Path(pyalloc.__file__).parent.parent)])
    done = run_python(
        "import sys; from pyalloc.cli import main; sys.exit(main(['doctor']))",
        env={"PYTHONPATH": path},
        expect=1,
    )
    assert "torch 9.9.9+cpu: this torch was built without CUDA" in done.stdout
    assert "next: install the CUDA build of PyTorch" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_doctor_says_what_can_be_done_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = SimpleNamespace(installed=False, reason=NO_DEVICE, torch_version="9.9")
    monkeypatch.setattr("pyalloc.cli.doctor.install", lambda: None)
    monkeypatch.setattr("pyalloc.cli.doctor.status", lambda: found)
    assert cli.main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert told.endswith(
        "torch 9.9: torch sees no CUDA device\n"
        "next: try a program without a GPU:\n      pyalloc dryrun python your_script.py\n"
    )


@pytest.mark.parametrize("pages", [3, 0])
@pytest.mark.parametrize("is_refused", [False, True])
def test_doctor_tries_an_allocation(
    is_refused: bool,
    pages: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def empty(size: int, **_: object) -> SimpleNamespace:
        if is_refused:
            raise RuntimeError("the driver is too old")
        return SimpleNamespace(data_ptr=lambda: size, device=SimpleNamespace(index=0))

    properties = SimpleNamespace(name="a card", total_memory=3 << 29, major=9, minor=1)
    cuda = SimpleNamespace(device_count=lambda: 2, get_device_properties=lambda _index: properties)
    torch = SimpleNamespace(cuda=cuda, empty=empty, uint8=None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    lines = ["settings: those above", "pyalloc is installed"]
    found = SimpleNamespace(
        installed=True, reason="active", torch_version="9.9", lines=lambda: lines
    )
    core = SimpleNamespace(
        block_info=lambda size: (0, 2 * size), stats=lambda index: {"pyalloc_pages": pages + index}
    )
    for name, stub in (("install", lambda: None), ("status", lambda: found), ("_core", core)):
        monkeypatch.setattr(f"pyalloc.cli.doctor.{name}", stub)
    assert cli.main(["doctor"]) == is_refused
    told = capsys.readouterr().out
    devices = "".join(f"device {index}: a card, 1.5 GiB, compute 9.1\n" for index in range(2))
    assert f"torch 9.9: active\n{devices}pyalloc is installed\nan allocation of 1 MiB " in told
    if is_refused:
        assert told.endswith("an allocation of 1 MiB failed: the driver is too old\n")
    else:
        assert f"an allocation of 1 MiB works (a block of {2 << 20} bytes)\n" in told
        assert ("the memory came from cudaMalloc" in told) == (pages == 0)


def test_program_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def form(*words: str, module: list[str] | None = None) -> list[str]:
        return launching.command("run", module, words)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_it.py").touch()
    python = sys.executable
    assert form(module=["package.module", "--lr", "3"]) == [
        python,
        "-m",
        "package.module",
        "--lr",
        "3",
    ]
    assert form("train_it.py", "a") == [python, "train_it.py", "a"]
    assert form("--", python, "x.py") == [python, "x.py"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert form("python", "x.py") == form("python3", "x.py") == [python, "x.py"]
    assert form("torchrun", "x.py") == [python, "-m", "torch.distributed.run", "x.py"]
    assert form("pyalloc", "doctor") == [python, "-m", "pyalloc", "doctor"]
    for wrong in (("gone.py",), ("gone",), ()):
        with pytest.raises(UsageError, match=r"was not found|no program given"):
            form(*wrong)
    with pytest.raises(UsageError, match="to run a module: pyalloc run -m gone"):
        form("gone")
    with pytest.raises(UsageError, match="no module given"):
        form(module=[])


def test_what_a_shell_would_have_taken_apart_is_told() -> None:
    with pytest.raises(UsageError, match=r"was not found; remove the quotes around the command$"):
        launching.command("dryrun", None, ["sh train.py --lr 3"])
    with pytest.raises(UsageError, match=r"put variables in front: LR=3 pyalloc dryrun \.\.\.$"):
        launching.command("dryrun", None, ["LR=3", "python", "x.py"])
    with pytest.raises(UsageError, match=r"put variables in front: A='1 2' pyalloc run \.\.\.$"):
        launching.command("run", None, ["A=1 2", "python", "x.py"])


def test_a_program_that_may_not_be_executed_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.sh"
    script.write_text("python train.py\n")
    with pytest.raises(UsageError, match="is not executable") as refused:
        launching.command("run", None, [str(script)])
    told = str(refused.value)
    assert "not found" not in told and f"chmod +x {shlex.quote(str(script))}" in told
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"not in PATH; write \./train\.sh"):
        launching.command("run", None, ["train.sh"])
    assert launching.command("run", None, ["./train.sh"]) == ["./train.sh"]


def test_pythons_that_pyalloc_cannot_get_into_are_refused() -> None:
    for words in (["-I", "x.py"], ["-W", "error", "-uE", "x.py"], ["-X", "dev", "-Sc", "pass"]):
        with pytest.raises(UsageError, match="leave out -"):
            launching.check_reached(["python3.11", *words])
        with pytest.raises(UsageError, match="leave out -"):
            launching.check_reached(["python3.14t", *words])
    for words in (["x.py", "-I"], ["-Werror", "-OO", "x.py"], ["-m", "x", "-S"], ["-c", "-E"]):
        launching.check_reached(["/usr/bin/python", *words])
    launching.check_reached(["torchrun", "-I"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["top", "trace", "--device", "-1"],
        ["report", "trace", "--device", "one"],
        ["report", "trace", "--device", "4294967296"],
        ["live", "--", "-5"],
        ["live", "1", "--count", "-1"],
        ["live", "1", "--lines", "99999999999"],
        ["diff", "trace", "--steps", "1", "two"],
    ],
)
def test_numbers_that_name_nothing_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["x", "-1", "3-", "1-2-3", "", "ALL"])
def test_what_names_no_steps_is_told_as_it_was_typed(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["report", "trace", f"--step={step}"])
    assert f"{step!r} is neither a step N nor steps N-M nor 'all'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["report", "a.pya", "--steps", "3"], "arguments: --steps 3; did you mean --step?\n"),
        (["replay", "a.pya", "--limt=3GB", "--frce"], "did you mean --limit --force?\n"),
        (["dryrun", "--recrod", "a.pya", "python", "--by"], "--recrod; did you mean --record?\n"),
        (["top", "a.pya", "by.pya", "-x"], "unrecognized arguments: by.pya -x\n"),
    ],
)
def test_a_misspelled_option_is_told_the_right_one(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize("command", ["run", "dryrun"])
@pytest.mark.parametrize("words", [["python", "a.py"], ["bin/python3.11", "a.py"], ["a.py", "-V"]])
def test_a_forgotten_name_of_a_recording_is_not_that_of_the_program(
    command: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was written to, or named as a file that --force overwrites."""
    (tmp_path / "bin").mkdir()
    for name in ("bin/python3.11", "a.py"):
        (tmp_path / name).write_text("print()")
    words = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
    words = words if words[1] != "-V" else [words[0], sys.executable, "-V"]
    assert cli.main([command, "--force", "--record", *words]) == 2
    name = shlex.quote(words[0])  # the folder of temporary files may have a space
    assert f"before the program: --record out.pya {name} ..." in capsys.readouterr().err
    assert (tmp_path / "a.py").exists() and (tmp_path / "bin/python3.11").exists()


def test_a_program_taken_for_the_recordings_name_is_not_called_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("run", "dryrun"):
        assert cli.main([command, "--record", "train.py"]) == 2
        assert "--record out.pya train.py ..." in capsys.readouterr().err


@pytest.mark.parametrize("command", ["replay", "sweep"])
def test_a_limit_that_is_no_size_is_told_with_its_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in ("much", "-1GB", "-.5GB"):
        assert cli.main([command, "trace", "--limit", size]) == 2
        assert f"pyalloc {command}: --limit: '{size}' is not a size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["pyhton", "train.py"],
            "'pyhton' was not found; to run a module: pyalloc dryrun -m pyhton",
        ),
        (["./no/such", "train.py"], "'./no/such' was not found\n"),
        (["/usr", "train.py"], "'/usr' is a folder"),
        (["python", "-I", "train.py"], "leave out -I"),
        (["--devices", "0", "python", "train.py"], "--devices must be from 1 to 16, not 0"),
        (["--memory", "0", "python", "train.py"], "--memory: '0' is not a size; write for example"),
        (["--memory", "-1GB", "python", "train.py", "-1GB"], "--memory: '-1GB' is not a size"),
        (["--memory", "1", "python", "train.py"], "--memory: '1' is less than 2 MiB; did you mean"),
        (["python", "train.py"], "has no PyTorch"),
    ],
)
def test_a_program_that_is_not_run_overwrites_no_recording(
    words: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(python: str) -> None:
        raise hostcuda.HostCudaError(f"{python} has no PyTorch")

    monkeypatch.setattr(hostcuda, "find_torch", absent)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    path = tmp_path / "out.pya"
    path.write_text("of yesterday")
    assert cli.main(["dryrun", "--record", str(path), "--force", *words]) in (2, 3)
    assert told in capsys.readouterr().err
    assert path.read_text() == "of yesterday"


@pytest.mark.parametrize(
    "name", ["a b", "é", "it's", "new\nline\\x", "\x1b[31mred", "\udcff\udc9b", ""]
)
def test_the_next_command_names_the_file_that_there_is(name: str) -> None:
    """Of names that are no UTF-8, or that a terminal would obey, it named another."""
    word = console.quoted(name)
    assert word.isprintable() and console.printable(word) == word
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], stdout=subprocess.PIPE, check=True)
    assert os.fsdecode(done.stdout) == name


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_folder_is_no_recording_to_overwrite(
    force: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["dryrun", "--record", str(tmp_path), *force, sys.executable, "-V"]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path} is a folder" in told and "--force" not in told


def test_a_name_that_is_too_long_is_told_before_the_program_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it is too long only with the `.part` of a recording that has not ended."""
    for name in (f"{'x' * 300}.pya", f"{'x' * 248}.pya"):
        path = tmp_path / name
        assert cli.main(["dryrun", "--record", str(path), sys.executable, "-V"]) == 2
        assert f"{path}: the name is too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["replay", "report", "top", "stats", "diff", "sweep", "events", "plan", "export --to csv"],
)
def test_whether_a_file_can_be_written_is_told_before_any_is_read(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = words.split()
    text = {"plan": ".plan", "export": ".csv"}.get(command, ".txt")
    there = tmp_path / f"old{text}"
    there.touch()
    begin = [command, "gone.pya", *options, "-o"]
    assert cli.main([*begin, str(there)]) == 2
    assert f"{there} already exists; --force overwrites it" in capsys.readouterr().err
    if text == ".txt":
        assert cli.main([*begin, "new.pdf"]) == 2
        assert "new.pdf: this command does not write .pdf" in capsys.readouterr().err


def test_the_terminal_is_not_named_by_a_dash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace.pya"
    trace.touch()
    assert cli.main(["top", str(trace), "-o", "-"]) == 2
    assert "leave -o out" in capsys.readouterr().err


def test_the_remaining_time_counts_from_where_the_work_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    shown: list[str] = []
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    monkeypatch.setattr(console, "show_in_place", shown.append)
    progress = console.Progress("placing")
    progress.enabled = True
    now += 60  # of something else
    progress(10_000_000, 40_000_000)
    now += 1
    progress(20_000_000, 40_000_000)
    assert shown == ["placing:  25 %", "placing:  50 %, 10.0 MB/s, 2 s left"]
    now += 1
    progress(5_000_000, 40_000_000)  # the next one, of another kind
    now += 1
    progress(10_000_000, 40_000_000)
    assert shown[2:] == ["placing:  12 %", "placing:  25 %, 5.0 MB/s, 6 s left"]


@pytest.mark.parametrize(("columns", "longest"), [(40, 39), (1, 0), (0, 79)])
def test_progress_stays_in_one_line_of_the_terminal(
    columns: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0: the terminal does not know."""
    ours, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 20, columns, 0, 0))
    monkeypatch.setattr(console, "_AFTER_S", -1.0)
    monkeypatch.setattr(console, "_EVERY_S", -1.0)
    with os.fdopen(terminal, "w") as stream, os.fdopen(ours, "rb", buffering=0) as shown:
        monkeypatch.setattr(sys, "stderr", stream)
        progress = console.Progress("reading a.rather.long.name.of.a.trace.pya")
        progress(5_000_000, 10_000_000)
        progress.close()
        monkeypatch.undo()
        lines = shown.read(4096).split(b"\r")
    assert b"reading a.rather.long.name"[:longest] in lines[1]
    assert max(map(len, lines)) == longest


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (UsageError("no such thing"), 2, "pyalloc top: no such thing"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_command_leaves_no_progress_behind(
    error: BaseException, code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was overwritten as far as the message reached, and so was the shell's own line."""
    ours, terminal = os.openpty()
    monkeypatch.setattr(console, "_AFTER_S", -1.0)
    monkeypatch.setattr(console, "_EVERY_S", -1.0)

    def fail(*_: object, progress: console.Progress, **__: object) -> None:
        progress(5_000_000, 10_000_000)
        raise error

    monkeypatch.setattr("pyalloc.trace.read_once", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("pyalloc.trace.analyse", fail)
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert cli.main(["top", "a.trace.of.a.long.name.pya"]) == code
        monkeypatch.undo()
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as end, contextlib.suppress(OSError):
        while True:  # nobody has the other end any more
            shown += end.read(4096)
    _, progress, _, blank, rest = shown.decode().split("\r", 4)
    assert "50 %" in progress and not blank.strip() and rest.strip() == told

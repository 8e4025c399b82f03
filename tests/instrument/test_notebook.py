"""`%load_ext pyalloc`: cells recorded and reported on, in a real IPython and in a notebook's kernel."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path

import pytest
from dry_support import python_for, run_checked

from instrument.tools import ALLOCATORS, MIB, Plan, pyalloc, small_trace
from pyalloc import trace
from pyalloc.report import cell
from pyalloc.report.html import page
from pyalloc.traces import source

MAKE = """
import torch
def make(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
"""
# Runs the cells that its second argument lists; a line says how each ended, and what is in use then.
IPYTHON = """
import torch, json, sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
sys.stderr = sys.stdout
shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}), colors="nocolor")
for cell in json.loads(sys.argv[1]):
    result = shell.run_cell(cell, store_history=True)
    error = result.error_in_exec or result.error_before_exec
    ended = type(error).__name__ if error else "well"
    del result, error
    in_use = torch.cuda.memory_allocated() >> 20
    print(f"-- {ended}, {in_use} MiB", flush=True)
"""


def skip_without(*names: str) -> None:
    for name in names:
        pytest.importorskip(name, reason=f"needs {name}: pip install {name.lower()}")


def run_cells(tmp_path: Path, allocator: str, *cells: str) -> list[str]:
    """The output of each, whose last line says how it ended."""
    skip_without("IPython")
    script = tmp_path / "cells.py"
    script.write_text(IPYTHON)
    out = pyalloc(
        "dryrun", "--memory", "4GB", "--allocator", allocator,
        python_for(IPYTHON), "-W", "ignore", script, json.dumps(["%load_ext pyalloc", MAKE, *cells]),
        env={"IPYTHONDIR": str(tmp_path), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    parts = re.split(r"(?<= MiB)\n", out)
    said = [part for part in parts if re.search(r"^-- .* MiB\Z", part, re.MULTILINE)]
    assert len(said) == 2 + len(cells), out
    return said[2:]


@pytest.mark.torch
@ALLOCATORS
def test_a_cell_is_recorded_and_told(tmp_path: Path, allocator: str) -> None:
    _, said, later = run_cells(
        tmp_path,
        allocator,
        "old = make(10)",
        "%%pyalloc\na = make(64)\nb = make(32)\n\ndel a\nb.shape",
        "%%pyalloc --text\ndef more(mib):\n    return make(mib)\nc = more(16);",
    )
    assert "peak allocated 106.0 MiB, " in said
    told = "in use: 10.0 MiB before the cell, 42.0 MiB after it (32.0 MiB more); 2 requests"
    assert told in " ".join(said.split())
    assert "at the peak, by line" in said and "2 x  In[2]:3 make" in said
    assert re.search(
        r"recorded: .*/cell-4\.pya \(deleted when the kernel ends; -o OUT\.pya keeps it\)", said
    )
    assert re.search(r"Out\[4\]: torch\.Size\(\[33554432\]\)\n-- well, 42 MiB", said)
    assert "58.0 MiB after it (16.0 MiB more); 1 request " in " ".join(later.split())
    assert "Out[" not in later and later.endswith("-- well, 58 MiB")
    assert not list(tmp_path.glob("pyalloc-*")), "the folder goes with the kernel"


@pytest.mark.torch
def test_what_goes_wrong_in_a_cell_leaves_a_whole_recording(tmp_path: Path) -> None:
    path, nested = tmp_path / "failed.pya", tmp_path / "nested.pya"
    failed, again, inner, *refused, last = run_cells(
        tmp_path,
        "pyalloc",
        f"%%pyalloc --text -o {path}\ndef work():\n    x = make(100)\n    1 / 0\nwork()",
        f"%%pyalloc --text -o {path}\nmake(7)",
        f"%%pyalloc --text -o {nested}\ny = make(3)\nget_ipython().run_cell_magic('pyalloc', '', 'make(5)')",
        "%%pyalloc\nthis is no Python",
        "%%pyalloc\nimport asyncio\nawait asyncio.sleep(0)",
        "%%pyalloc --stacks some\nmake(7)",
        "%%pyalloc --unknown\nmake(7)",
        f"%%pyalloc --text --force -o {path}\nz = make(2)",
    )
    assert "-- ZeroDivisionError, 100 MiB" in failed and f"recorded: {path}\n" in failed
    # The last lines are the error with the cell's own lines, and none of ours.
    shown = failed[failed.index("Traceback (most") :]
    assert "In[3], line 4, in work()" in shown and "1 / 0" in shown and "notebook.py" not in shown
    assert f"UsageError: {path} already exists; --force overwrites it" in again
    assert again.endswith("-- UsageError, 100 MiB"), "and nothing was run"
    assert f"UsageError: already recording to {nested}" in inner and f"recorded: {nested}" in inner
    words = (
        "invalid syntax",
        "cannot run a cell that awaits",
        "stacks must be one of",
        "unrecognized arguments",
    )
    for said, why, kind in zip(refused, words, ("SyntaxError", *["UsageError"] * 3), strict=True):
        assert why in said and f"-- {kind}, " in said and "recorded:" not in said
    assert last.endswith("-- well, 105 MiB")
    assert trace.analyse(nested).totals["is_complete"]
    found = trace.analyse(path)
    assert found.totals["is_complete"] and found.totals["end_bytes"] == 105 * MIB


@pytest.mark.torch
def test_what_ipython_holds_is_told_and_let_go(tmp_path: Path) -> None:
    """A value that was shown, and the variables of a function that failed: `del` frees neither."""
    said = run_cells(
        tmp_path,
        "native",
        "named = make(40)\nnamed",
        "[make(5), torch.zeros(2, 2, device='cuda', layout=torch.sparse_coo)]",
        "def work():\n    x = [make(100)]\n    1 / 0\nwork()",
        "%pyalloc",
        "%pyalloc --free",
        "%pyalloc",
        "def work():\n    x = make(200)\n    1 / 0\nwork()",
        "%pyalloc --free",
        "%%pyalloc --text\npass",
        "work()",
        "%%pyalloc --text\npass",
    )
    assert "allocated 145.0 MiB" in said[3]
    assert "IPython keeps 5.0 MiB in Out[4], held by no variable;" in said[3]
    assert "100.0 MiB in local variables of the last error's traceback" in said[3]
    assert "105.0 MiB came free" in said[4] and said[4].endswith("-- well, 40 MiB")
    assert "allocated 40.0 MiB" in said[5] and "IPython keeps" not in said[5]
    assert "200.0 MiB came free" in said[7] and said[7].endswith("-- well, 40 MiB")
    assert "IPython keeps" not in said[8]
    assert "200.0 MiB in local variables" in said[10]


@pytest.mark.torch
def test_what_a_variable_holds_as_well_is_not_told(tmp_path: Path) -> None:
    """Views, what is in a variable's list or model, and arguments of what failed: freeing them gives nothing back."""
    said = run_cells(
        tmp_path,
        "native",
        "named = make(40)\nnamed[:8]",
        "nested = {'made': [make(5)]}\nnested['made'][0]",
        "net = [torch.nn.Linear(2048, 2048, bias=False, device='cuda')]\nnet[0].weight",
        "net[0].weight.grad = torch.zeros_like(net[0].weight)\nnet[0].weight.grad",
        "def work(x):\n    y = make(100)\n    1 / 0\nwork(named)",
        "%pyalloc",
        "del named, nested, net",
        "%pyalloc",
    )
    assert "IPython keeps 100.0 MiB in local variables" in said[5] and "Out[" not in said[5]
    kept = " ".join(said[7].split())
    assert "keeps 77.0 MiB in Out[3], Out[4], Out[5], Out[6], held by no variable;" in kept
    assert "keeps 140.0 MiB in local variables" in kept


@pytest.mark.torch
def test_an_ipython_that_keeps_no_outputs_lets_go_of_the_rest(tmp_path: Path) -> None:
    """InteractiveShell.cache_size = 0: its displayhook.flush() raises then."""
    said = run_cells(
        tmp_path,
        "native",
        "hook = get_ipython().displayhook\nhook.cache_size = hook.do_full_cache = 0",
        "def work():\n    x = make(100)\n    1 / 0\nwork()",
        "%pyalloc --free",
    )
    assert "100.0 MiB came free" in said[2] and said[2].endswith("-- well, 0 MiB")


@pytest.mark.torch
def test_without_a_device_the_cell_is_not_run(tmp_path: Path) -> None:
    skip_without("IPython")
    cells = ["%load_ext pyalloc", "%%pyalloc\nprint('it', 'ran')", "%pyalloc"]
    done = run_checked(
        [sys.executable, "-W", "ignore", "-c", IPYTHON, json.dumps(cells)],
        env={"CUDA_VISIBLE_DEVICES": "", "IPYTHONDIR": str(tmp_path)},
    )
    why = "UsageError: there is no CUDA device to record; without one, use: pyalloc dryrun jupyter lab"
    assert why in done.stdout and "it ran" not in done.stdout
    assert "has not used CUDA yet" in done.stdout


NOTEBOOK = """
import json, sys
import nbformat.v4
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(cell) for cell in json.loads(sys.argv[1])]
NotebookClient(nbformat.v4.new_notebook(cells=cells), allow_errors=True).execute()
print(json.dumps([cell.outputs for cell in cells]))
"""


@pytest.mark.torch
def test_a_notebook_shows_the_page(tmp_path: Path) -> None:
    skip_without("nbclient", "ipykernel")
    cells = [
        "%load_ext pyalloc",
        MAKE,
        "%%pyalloc --height 500\nx = make(64)\nx.shape",
        "%%pyalloc\nassert len(x) == 3",
    ]
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    out = pyalloc(
        "dryrun", "--memory", "4GB", sys.executable, "-W", "ignore", tmp_path / "notebook.py",
        json.dumps(cells), env={"IPYTHONDIR": str(tmp_path), "JUPYTER_DATA_DIR": str(tmp_path)},
    )  # fmt: skip
    told = json.loads(next(line for line in out.splitlines() if line.startswith("[[")))
    shown, value = told[2]
    assert value["data"]["text/plain"] == "torch.Size([67108864])"
    text, code = shown["data"]["text/plain"], shown["data"]["text/html"]
    assert "1 x  In[2]:3 make" in text and html.escape(text) in code
    (document,) = re.findall(r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts" ', code)
    assert "height:500px" in code
    content = re.search(
        r'<script id="data" type="application/json">(.*?)</script>', html.unescape(document)
    )
    assert content is not None
    frames = [frame for frame, _ in json.loads(content[1])["frames"]]
    assert "In[2]:3 make" in frames and "In[3]:2 <module>" in frames
    assert [each["output_type"] for each in told[3]] == ["display_data", "error"]


def test_a_page_in_a_frame_is_the_page(plan: Plan) -> None:
    plan.event("user", "command=<script>'\"&amp;")
    document = page(trace.analyse(small_trace(plan)))
    code = cell.framed("a < b", document, 'of "cell" 3', 100)
    (inside,) = re.findall(r'srcdoc="([^"]*)"', code)
    assert html.unescape(inside) == document and "<pre style" in code and "a &lt; b" in code
    assert 'title="of &quot;cell&quot; 3"' in code


def test_a_cell_that_takes_no_memory_says_so(plan: Plan) -> None:
    plan.event("user", "allocator=native")
    told = cell.summary(trace.analyse(plan.done()), (0, 0), (0, 0))
    assert "in use: 0 bytes before the cell, 0 bytes after it (unchanged); 0 requests" in told
    assert "It holds no allocation" in told and "at the peak" not in told


def test_files_are_called_as_a_person_knows_them() -> None:
    assert source.short_file("/tmp/ipykernel_7/42.py") == "ipykernel_7/42.py"
    source.name_files({"/tmp/ipykernel_7/42.py": "In[3]"})
    assert source.short_file("/tmp/ipykernel_7/42.py") == "In[3]"

"""Notebooks and IPython: after `%load_ext pyalloc`, a cell that begins with `%%pyalloc` is recorded and reported on.

`%pyalloc` says what is in use now and how much of it IPython itself holds; `%pyalloc --free` releases that.  IPython is
imported only when it loads this.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

from pyalloc.errors import PyallocError

if TYPE_CHECKING:  # `import pyalloc` does not need these
    import argparse
    import tempfile

_HEIGHT = 640  # pixels
_MOMENTS = 24  # that the page's slider goes through
_LEAST_HELD = 1 << 20  # holding less is not reported
_OUTPUTS = ("_", "__", "___")
_LAST_ERROR = ("last_exc", "last_value", "last_traceback", "last_type")


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext pyalloc`: registers the magics `%%pyalloc` and `%pyalloc`."""
    from IPython.core.magic_arguments import MagicArgumentParser

    for kind, name, prepare, run in (
        ("cell", "%pyalloc", _prepare_cell, _Cells(shell).run),  # help adds one more %
        ("line", "pyalloc", _prepare_line, _Line(shell).run),
    ):
        parser = MagicArgumentParser(name)
        prepare(parser)
        shell.register_magic_function(_magic(parser, run), kind, "pyalloc")


def _magic(parser: Any, run: Any) -> Any:
    def magic(line: str, *cell: str) -> Any:
        __tracebackhide__ = True
        return run(parser.parse_argstring(line), *cell)

    magic.__doc__ = f"{run.__doc__}\n\n{parser.format_help()}"
    return magic


def _prepare_cell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT.pya",
        help="keep the recording in this file (default: it is deleted when the kernel ends)",
    )
    parser.add_argument("--text", action="store_true", help="show a few lines, not the page")
    parser.add_argument(
        "--height",
        type=int,
        default=_HEIGHT,
        metavar="PIXELS",
        help=f"height of the page (default: {_HEIGHT})",
    )
    parser.add_argument(
        "--stacks",
        default="python",
        metavar="WHICH",
        help="which stacks to record: python, all or none (default: python)",
    )
    parser.add_argument(
        "--no-marks",
        action="store_true",
        help="do not mark phases, steps and categories automatically",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def _prepare_line(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--free", action="store_true", help="empty Out, forget the last error, collect garbage"
    )


@dataclass
class _Cells:
    """The recorded cells of one IPython shell."""

    shell: Any
    folder: tempfile.TemporaryDirectory[str] | None = None  # removed when the kernel ends

    def run(self, args: argparse.Namespace, cell: str) -> Any:
        """Records the CUDA memory of this cell and shows the report, also if the cell fails."""
        __tracebackhide__ = True
        from pyalloc.inside import recording

        codes = self._compiled(cell)
        before = _figures()
        path = self._path() if args.output is None else args.output
        try:
            recorder = recording.begin(
                path, args.stacks, automatic=not args.no_marks, force=args.force
            )
        except PyallocError as error:
            why = str(error).replace("force=True", "--force")
            _refuse(why.replace("pyalloc dryrun --record", "pyalloc dryrun jupyter lab"))
        try:
            value = None
            for code in codes:
                value = eval(code, self.shell.user_ns)
        finally:
            recorder.stop()
            self._report(recorder.path, args, before)
        return None if cell.rstrip().endswith(";") else value

    def _path(self) -> Path:
        from pyalloc.common import files

        if self.folder is None:
            self.folder = files.temporary_folder("pyalloc-")
        first = path = Path(self.folder.name, f"cell-{_number(self.shell)}.pya")
        n_times = 1
        while path.exists():
            n_times += 1
            path = first.with_name(f"{first.stem}-{n_times}.pya")
        return path

    def _compiled(self, cell: str) -> Iterable[CodeType]:
        """The code of its statements, and of its last expression, whose value is the cell's, as without the magic."""
        shell = self.shell
        # Line numbers include the line of the magic, as in editors.
        text = "\n" + shell.transform_cell(cell)
        name = shell.compile.cache(text, _number(shell), raw_code=cell)
        tree = shell.transform_ast(shell.compile.ast_parse(text, filename=name))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
            codes = [shell.compile(tree, name, "exec")]
            if last is not None:
                codes.append(shell.compile(ast.Expression(last.value), name, "eval"))
        if any(code.co_flags & inspect.CO_COROUTINE for code in codes):
            _refuse(
                "%%pyalloc cannot run a cell that awaits; put `with pyalloc.record(...):` around its code instead"
            )
        return codes

    def _report(self, path: Path, args: argparse.Namespace, before: tuple[int, int]) -> None:
        from pyalloc import trace
        from pyalloc.common import console
        from pyalloc.report import cell, html
        from pyalloc.traces import source

        source.name_files(_names(self.shell))
        try:
            found = trace.analyse(path, moments=0 if args.text else _MOMENTS)
        except PyallocError as error:  # the cell's own error matters more
            print(f"pyalloc: no report: {error}", file=sys.stderr)
            return
        told = cell.summary(found, before, _figures(), _held(self.shell.user_ns))
        until = " (deleted when the kernel ends; -o OUT.pya keeps it)" * (args.output is None)
        text = console.printable(f"{told}\nrecorded: {path}{until}")
        shown = {"text/plain": text}
        if not (args.text or found.is_empty):
            title = f"memory of cell {_number(self.shell)}"
            shown["text/html"] = cell.framed(text, html.page(found), title, args.height)
        _display(shown)


@dataclass
class _Line:
    """What one IPython shell holds."""

    shell: Any

    def run(self, args: argparse.Namespace) -> None:
        """Says what CUDA memory is in use, and how much of it IPython itself holds."""
        from pyalloc import live
        from pyalloc.common import console
        from pyalloc.common.units import size
        from pyalloc.report.live import screen
        from pyalloc.report.text import wrapped

        before, _ = _figures()
        if args.free:
            self._free()
        lines = [screen(live.figures(), []), *map(wrapped, _held(self.shell.user_ns))]
        if args.free:
            lines.append(f"  {size(before - _figures()[0])} came free")
        print(console.printable("\n".join(lines)))

    def _free(self) -> None:
        """Frees what a restart of the kernel would free and no name of the program holds."""
        if self.shell.displayhook.do_full_cache:  # else there are no outputs, and flush() raises
            self.shell.displayhook.flush()
        self.shell.last_execution_result = None  # its value, or its error
        self.shell.InteractiveTB.tb = None
        for name in _OUTPUTS:  # IPython remembers these a second time
            self.shell.user_ns_hidden.pop(name, None)
        for name in _LAST_ERROR:
            if hasattr(sys, name):
                delattr(sys, name)
        gc.collect()


def _display(shown: dict[str, str]) -> None:
    """Shows what there is room for: a terminal shows the text, a notebook the page."""
    from IPython.display import display

    display(shown, raw=True)


def _refuse(why: str) -> NoReturn:
    """Raises an error that IPython shows as one line; others are shown with all their calls."""
    from IPython.core.error import UsageError

    raise UsageError(why)


def _number(shell: Any) -> int:
    """The number of the running cell; IPython's execution_count is one more in newer versions."""
    return len(shell.user_ns["In"]) - 1


def _names(shell: Any) -> dict[str, str]:
    """What people call the cells, by the names of the files that they are compiled as."""
    known: dict[str, int] = getattr(shell.compile, "_filename_map", {})  # for tracebacks
    return {name: f"In[{number}]" for name, number in known.items()}


def _figures() -> tuple[int, int]:
    """Bytes in use and number of requests so far, on all devices; both 0 before CUDA is used."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0
    each = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())]
    in_use = sum(stats.get("allocated_bytes.all.current", 0) for stats in each)
    return in_use, sum(stats.get("allocation.all.allocated", 0) for stats in each)


# ---- what IPython itself holds, which `del` of a name does not free ----


def _held(names: dict[str, Any]) -> list[str]:
    """A sentence each: about outputs that no variable holds, and about the variables of the last error."""
    from pyalloc.common.units import size

    outputs = {f"Out[{n}]": _storages([value]) for n, value in names.get("Out", {}).items()}
    of_error = _storages(_variables_of_error(names))
    if not any((*outputs.values(), of_error)):
        return []  # without a look at all variables
    variables = [v for name, v in names.items() if not name.startswith("_") and name != "Out"]
    own = _storages(t for v in variables for part in _parts(v) for t in _tensors_of(part))
    kept = {name: _without(found, own) for name, found in outputs.items()}
    which = ", ".join(name for name, found in kept.items() if found)
    in_outputs = {at: n for found in kept.values() for at, n in found.items()}
    found = [
        (sum(in_outputs.values()), f"in {which}, held by no variable"),
        (
            sum(_without(of_error, own).values()),
            "in local variables of the last error's traceback",
        ),
    ]
    return [
        f"IPython keeps {size(n_bytes)} {where}; `%pyalloc --free` releases them"
        for n_bytes, where in found
        if n_bytes >= _LEAST_HELD
    ]


def _without(found: dict[int, int], own: dict[int, int]) -> dict[int, int]:
    return {at: n for at, n in found.items() if n and at not in own}


def _variables_of_error(names: dict[str, Any]) -> Iterator[Any]:
    """Local variables of the error being handled, or of the last one, except the notebook's own."""
    trace = sys.exc_info()[2] or getattr(sys, "last_traceback", None)
    while trace is not None:
        if trace.tb_frame.f_locals is not names:
            yield from trace.tb_frame.f_locals.values()
        trace = trace.tb_next


def _storages(values: Iterable[Any]) -> dict[int, int]:
    """Bytes of the storages of CUDA tensors by address, also of those in lists, tuples and dicts."""
    torch: Any = sys.modules.get("torch")
    sizes: dict[int, int] = {}
    for each in (part for value in values if torch is not None for part in _parts(value)):
        if issubclass(type(each), torch.Tensor) and each.is_cuda:
            for tensor in [each, each.grad] if each.is_leaf else [each]:
                # Sparse tensors, and those of lazy modules, have no storage of their own.
                with contextlib.suppress(AttributeError, RuntimeError, ValueError):
                    storage = tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def _parts(value: Any) -> Iterable[Any]:
    """What a list, tuple or dict holds, else the value itself; isinstance() would make a proxy load its object."""
    if issubclass(type(value), dict):
        return list(value.values())
    return value if issubclass(type(value), list | tuple) else [value]


def _tensors_of(value: Any) -> Iterable[Any]:
    """The tensors of a module, else the value itself."""
    torch: Any = sys.modules["torch"]
    is_module = issubclass(type(value), torch.nn.Module)
    return [*value.parameters(), *value.buffers()] if is_module else [value]

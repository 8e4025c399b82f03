"""From stacks to names that people know: which line of the user's own code, in which function or method."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from pyalloc.common import pythons

Frame = tuple[str, str, int]  # name, file, line; innermost first in a stack
# Files that torch.compile writes to its cache.
_COMPILED = r"/[a-z2-7]{2}/(c[a-z2-7]{7})[a-z2-7]{44}\.py$"
# pyalloc's modules and rooms: in a checkout they are in no folder of libraries.
_OWN = "|".join(re.escape(path.stem) for path in Path(__file__).parents[1].iterdir())
_LIBRARY = re.compile(
    r"(/site-packages/|/dist-packages/|/lib(64)?/python3\.\d+t?/|^<(frozen|string|eval)"
    rf"|/pyalloc/({_OWN})(/[\w/]+)?\.py$"
    rf"|/torchinductor_\w+/|{_COMPILED}"
    r"|/torch_geometric\.[\w.]+\.py$)"  # and files that torch_geometric writes
)
_CPP = re.compile(
    rf"(\.so(\.\d+)*$|^\?*$|\.(cpp|cc|cxx|cu|cuh|h|hpp|inl|c|S|o)$|(^|/){pythons.PROGRAM}$)"
)
# Libraries whose lines tell more than the user's call into them: models, losses, trainers.
_BUILT_ON_TORCH = re.compile(r"/(?:site|dist)-packages/(?!(?:torch|functorch|triton|pyalloc)/)")
_BOOTSTRAP = "/pyalloc/_bootstrap/"
_OWN_CALL = re.compile(rf"{_BOOTSTRAP}|/torch/_ops\.py$")  # and torch's, between pyalloc's frames
_GRAPH = "<eval_with_key>"
_ENGINE = "torch::autograd::Engine::"
_AUTOGRAD: Frame = (f"{_ENGINE}thread_main", "", 0)
# torch's own functions: losses, softmax, distributions.  The program cannot change what they do inside.
_OF_TORCH = re.compile(r"/torch/(nn|optim|distributions|functional\.py$)")
_BACKWARD = re.compile(r"/torch/autograd/(__init__|graph)\.py$")
_ENTERED = re.compile(r"/torch/(autograd/function|utils/checkpoint)\.py$")  # by autograd's threads
_PRODUCT = re.compile(
    r"@|m[mv]_?\(|dot\(|matmul|linear|einsum|attention|lstm|gru|rnn|inner\(|cdist|matrix_power|triangular|pinv"
    r"|lstsq|cov\(|corrcoef",
    re.IGNORECASE,
)
# A product whose result is given, so that the line makes nothing else.
_GIVEN = re.compile(r"\bout=|m[mv]_\(")
_OVERRIDES = ("__torch_function__", "__torch_dispatch__")  # of modes and tensor subclasses
# torch's code on the way to a kernel: in 2.14, bmm(), sum(), norm() and some others pass through Python.
_ROUTE = re.compile(r"/torch/(_ops\.py$|_native/|_compile\.py$|_dynamo/eval_frame\.py$)")
_WORKSPACE = re.compile(
    r"at::cuda::(get(NewWorkspace|CUDABlasLtWorkspace|CurrentCUDABlasHandle)|allocateCUDABlasWorkspace)\b"
)
_TUNING = re.compile(
    r"/torch/_inductor/(runtime/benchmarking|autotune_process|select_algorithm)\.py$|/triton/testing\.py$"
)
_TUNERS = ("benchmark_all_configs", "benchmark_codegened_module")  # inductor's, with its arguments
_OPTIMIZER = re.compile(r"/torch/optim/(\w+)\.py$")
_SPELLED = {  # classes whose name is not that of their file, capitalized
    "_adafactor": "Adafactor",
    "_muon": "Muon",
    "adamw": "AdamW",
    "asgd": "ASGD",
    "lbfgs": "LBFGS",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "sgd": "SGD",
    "sparse_adam": "SparseAdam",
}
_NO_OPTIMIZER = ("optimizer", "lr_scheduler", "swa_utils", "_functional")


@dataclass(frozen=True)
class Place:
    """A line of code.  function: qualified if the source can be read."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """For example `examples/seq2seq.py:63 AdditiveAttention.forward`."""
        return f"{short_file(self.file)}:{self.line} {self.function}"


_named: dict[str, str] = {}  # files that people know by another name


def name_files(names: dict[str, str]) -> None:
    """Sets the names by which files are shown from now on: IPython's own names for a notebook's cells say nothing."""
    _named.update(names)


def short_file(file: str) -> str:
    """The last two parts of a path; of torch.compile's files, just enough to tell them apart."""
    return _named.get(file) or _short_file(file)


@functools.cache
def _short_file(file: str) -> str:
    compiled = re.search(_COMPILED, file)
    if compiled:
        return f"torch.compile/{compiled[1]}.py"
    return "/".join(PurePath(file).parts[-2:])


def is_foreign(file: str) -> bool:
    """Is this a library's file, not the user's?"""
    return bool(_LIBRARY.search(file)) or is_cpp(file)


def is_torch(file: str) -> bool:
    """Is this torch's file, or Python's: neither the user's, nor of a library built on torch?"""
    return is_foreign(file) and not _BUILT_ON_TORCH.search(file)


def is_cpp(file: str) -> bool:
    """Is this code in C or C++, or the interpreter's?"""
    return bool(_CPP.search(file))


def _lines(file: str) -> list[str]:
    """The lines of a source file.  Its name comes from a trace, so devices and pipes must not be opened."""
    is_source = file in linecache.cache or (file.endswith(".py") and os.path.isfile(file))
    return linecache.getlines(file) if is_source else []


@functools.cache
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, qualified name) of each function in a file; empty if it cannot be read."""
    found: list[tuple[int, int, str]] = []
    # No recursion: the tree of a sum with a thousand terms is a thousand levels deep.
    waiting: list[tuple[ast.AST, tuple[str, ...]]] = [(_tree(file), ())]
    while waiting:
        node, path = waiting.pop()
        for child in ast.iter_child_nodes(node):
            inner = path
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*path, child.name)
                if not isinstance(child, ast.ClassDef):
                    found.append((child.lineno, child.end_lineno or child.lineno, ".".join(inner)))
            waiting.append((child, inner))
    return tuple(found)


@functools.lru_cache(maxsize=8)
def _tree(file: str) -> ast.Module:
    """The file's syntax tree; empty if it cannot be read."""
    try:
        return ast.parse("".join(_lines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deeply
        return ast.Module([], [])


def statements_around(where: Place) -> list[ast.stmt]:
    """The simple statements of the innermost function around the line, or else of the module; in order."""
    around: ast.AST = _tree(where.file)
    inner: ast.AST | None = around
    while inner is not None:
        around, inner = inner, _function_at(inner, where.line)
    simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
    found = [each for each in ast.walk(around) if isinstance(each, simple)]
    return sorted(found, key=lambda each: each.lineno)


def _function_at(around: ast.AST, line: int) -> ast.AST | None:
    for each in ast.walk(around):
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) or each is around:
            continue
        if each.lineno <= line <= (each.end_lineno or each.lineno):
            return each
    return None


@functools.cache
def qualified(file: str, line: int, name: str) -> str:
    """The qualified name of the function around a line, or the plain name."""
    around = (full for first, last, full in _functions(file) if first <= line <= last)
    *_, best = (name, *around)  # the outer ones come first
    return best if best.split(".")[-1] == name or name.startswith("<") else name


def _is_between(file: str) -> bool:
    """May it be part of a call into pyalloc: pyalloc's code, torch's way to it, or C++ among these?"""
    return bool(_OWN_CALL.search(file)) or is_cpp(file)


def without_bootstrap(frames: list[Frame]) -> list[Frame]:
    """Leaves out pyalloc's own calls: a dry run's kernels are in Python, even on autograd's threads with no other.

    Torch's way to a kernel is in Python for some of them, too.
    """
    kept: list[Frame] = []
    for _, group in itertools.groupby(frames, lambda frame: _is_between(frame[1])):
        calls = list(group)
        if any(_BOOTSTRAP in file for _, file, _ in calls):
            calls = [frame for frame in calls if is_cpp(frame[1])]
        kept += calls
    # Other threads have the program's own lines around torch's way to a kernel.
    tells_nothing = bool(frames) and all(_ROUTE.search(file) for _, file, _ in kept)
    return [_AUTOGRAD] if tells_nothing else kept


def place(frames: tuple[Frame, ...]) -> Place | None:
    """The innermost line of the user's code, else torch.compile's graph's, a library's, other Python's; or None."""
    for name, file, line in frames:
        # Libraries generate code named "<string>", too, but its <module> is the program of `python -c`.
        if not is_foreign(file) or (file, name) == ("<string>", "<module>"):
            return Place(file, line, qualified(file, line, name))
    for _, file, line in frames:
        # A graph that runs as Python: on autograd's threads, no frame is the user's.
        if file.startswith(_GRAPH):
            is_backward = any(n == "backward" and "/_aot_autograd/" in f for n, f, _ in frames)
            graph = f"torch.compile/graph{file.removeprefix(_GRAPH)}"
            return Place(graph, line, "backward" if is_backward else "forward")
    further = inside(frames)
    if further is not None:
        return further
    files = [frame for frame in frames if frame[1].endswith(".py")]
    if files and _BACKWARD.search(files[0][1]):
        return None  # a backward pass within one, such as a checkpoint's
    for name, file, line in (*(f for f in files if not _is_route(f)), *files):
        return Place(file, line, name)
    return None


def _is_route(frame: Frame) -> bool:
    """Is it torch's way to a kernel, or a mode of torch's that a call passes on it?"""
    name, file, _ = frame
    return bool(_ROUTE.search(file)) or (name in _OVERRIDES and "/torch/" in file)


def innermost(frames: tuple[Frame, ...]) -> Frame | None:
    """The innermost call that is not torch's way to a kernel, such as a default device's mode."""
    return next((frame for frame in frames if not _is_route(frame)), None)


def innermost_in_python(frames: tuple[Frame, ...]) -> Frame | None:
    """The same without C++."""
    return innermost(tuple(frame for frame in frames if not is_cpp(frame[1])))


def nameless(frames: tuple[Frame, ...], phase: str) -> str:
    """What is known about a request without a line of Python; phase: the one it was made in."""
    is_known = phase == "backward" or (bool(frames) and is_backward(frames))
    return "backward (no Python stack)" if is_known else "(no stack)"


def name(frames: tuple[Frame, ...], phase: str = "") -> str:
    """The line of the user's code, else nameless()."""
    return str(place(frames) or nameless(frames, phase))


def inside(frames: tuple[Frame, ...]) -> Place | None:
    """The innermost line of a library built on torch that the user's own line led to; None if that is torch itself.

    A library's tensor subclass or mode, which passes each call on, is no such line.
    """
    for name, file, line in frames:
        if not is_foreign(file):
            return None
        if file.endswith(".py") and _BUILT_ON_TORCH.search(file) and name not in _OVERRIDES:
            return Place(file, line, qualified(file, line, name))
    return None


def optimizer(frames: tuple[Frame, ...]) -> str:
    """The optimizer whose code requested this ("Adam"), or "".  What a closure requests in its step is not its own."""
    for _, file, _ in frames:
        if not is_foreign(file):
            return ""
        match = _OPTIMIZER.search(file)
        if match and match.group(1) not in _NO_OPTIMIZER:
            return _SPELLED.get(match.group(1), match.group(1).capitalize())
    return ""


def is_autograd(frames: tuple[Frame, ...]) -> bool:
    """Is this on one of autograd's threads?  Known if C++ frames were recorded, or if it has no Python of its own."""
    return any(name.startswith(_ENGINE) for name, _, _ in frames)


def is_on_autograds(frames: tuple[Frame, ...], phase: str) -> bool:
    """The same, also known by Python that autograd calls there: a Function's backward, hooks, compiled code."""
    lines = [file for _, file, _ in frames if not is_cpp(file)]
    if not lines or is_autograd(frames) or _ENTERED.search(lines[-1]):
        return True
    return phase == "backward" and not any(_BACKWARD.search(file) for file in lines)


def is_backward(frames: tuple[Frame, ...]) -> bool:
    """Is this autograd at work: on a thread of its own, without a Python stack, or in what backward() prepares?"""
    return not frames or is_autograd(frames) or any(_BACKWARD.search(f) for _, f, _ in frames)


def is_checkpoint(frames: tuple[Frame, ...]) -> bool:
    """Does torch.utils.checkpoint run this?"""
    return any(file.endswith("/torch/utils/checkpoint.py") for _, file, _ in frames)


def is_bucket(frames: tuple[Frame, ...]) -> bool:
    """Is this one of DistributedDataParallel's buckets, in which it adds up gradients over the ranks?"""
    name, file = next(((n, f) for n, f, _ in frames if not is_cpp(f)), ("", ""))
    makes = name in ("_ddp_init_helper", "_pre_forward")
    return makes and file.endswith("/torch/nn/parallel/distributed.py")


def is_gathered(frames: tuple[Frame, ...]) -> bool:
    """Is this for parameters that FSDP2 gathers from all ranks?"""
    return any(n == "alloc_storage" and f.endswith("/_fsdp_param.py") for n, f, _ in frames)


def is_loaded(frames: tuple[Frame, ...]) -> bool:
    """Does torch.load() bring this to the device?"""
    return any(name == "load" and f.endswith("/torch/serialization.py") for name, f, _ in frames)


def is_cublas(frames: tuple[Frame, ...]) -> bool:
    """Does torch allocate a workspace for cuBLAS here?  Known only if C++ frames were recorded."""
    return any(_WORKSPACE.match(name) for name, _, _ in frames)


def is_compiled(frames: tuple[Frame, ...]) -> bool:
    """Is this in code that torch.compile wrote?"""
    return any(re.search(_COMPILED, file) for _, file, _ in frames)


def is_tuning(frames: tuple[Frame, ...]) -> bool:
    """Is this made by inductor or Triton to try kernels, on tensors of their own?"""
    return any(name in _TUNERS or _TUNING.search(file) for name, file, _ in frames)


def has_result(frames: tuple[Frame, ...]) -> bool:
    """Does torch.compile's code call a kernel here that has its result given, so that it may make a workspace only?"""
    for name, file, line in frames:
        if re.search(_COMPILED, file):
            text = text_of(Place(file, line, name))
            return "extern_kernels" in text and "out=" in text
    return False


def is_matrix_product(frames: tuple[Frame, ...]) -> bool | None:
    """Does the innermost line compute one, or torch.compile's code call a kernel for one?  None: that is unreadable."""
    for name, file, line in frames:
        if re.search(_COMPILED, file):
            text = text_of(Place(file, line, name))
            return "extern_kernels" in text if text else None
    # A tensor subclass (nested tensors, DTensors) runs the operator in its override, whose caller alone names it.
    overrides = [i for i, (name, _, _) in enumerate(frames) if name in _OVERRIDES]
    return any(_is_product(frames[i:]) for i in (0, *(i + 1 for i in overrides[-1:])))


def _is_product(frames: tuple[Frame, ...]) -> bool:
    for name, file, line in frames:
        if is_cpp(file) or _ROUTE.search(file) or name in _OVERRIDES:
            continue
        is_linear = name == "forward" and file.endswith("/torch/nn/modules/linear.py")
        return is_linear or bool(_PRODUCT.search(text_of(Place(file, line, name))))
    return False


def is_given(frames: tuple[Frame, ...]) -> bool:
    """Is the result of what the innermost line computes given to it?"""
    at = innermost_in_python(frames)
    return at is not None and bool(_GIVEN.search(text_of(Place(at[1], at[2], at[0]))))


def is_torchs(frames: tuple[Frame, ...]) -> bool:
    """Is this made inside one of torch's own Python functions, not by the line that calls it?"""
    at = innermost_in_python(frames)
    return at is not None and bool(_OF_TORCH.search(at[1]))


def text_of(where: Place) -> str:
    """The source line without indentation; "" if it cannot be read."""
    lines = _lines(where.file)
    return lines[where.line - 1].strip() if 0 < where.line <= len(lines) else ""

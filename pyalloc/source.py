"""From stacks to names a person knows: which line of the user's own code, in which function or method."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import os
import re
from dataclasses import dataclass
from pathlib import PurePath

Frame = tuple[str, str, int]  # name, file, line; innermost first in a stack
# What torch.compile wrote, in its cache.
_COMPILED = r"/[a-z2-7]{2}/(c[a-z2-7]{7})[a-z2-7]{44}\.py$"
_LIBRARY = re.compile(
    r"(/site-packages/|/dist-packages/|/lib/python3\.\d+/|^<(frozen|string|eval)|/pyalloc/(automarks|eventsources|marks|notebook|recording|_bootstrap/[\w/]+)\.py"
    rf"|/torchinductor_\w+/|{_COMPILED}"
    r"|/torch_geometric\.[\w.]+\.py$)"  # and what torch_geometric wrote
)
_CPP = re.compile(
    r"(\.so(\.\d+)*$|^\?*$|\.(cpp|cc|cxx|cu|cuh|h|hpp|inl|c|S|o)$|(^|/)python[\d.]*$)"
)
# Of the libraries those whose lines tell more than the call of the user's own that led there: models, losses, trainers.
_BUILT_ON_TORCH = re.compile(r"/(?:site|dist)-packages/(?!(?:torch|functorch|triton|pyalloc)/)")
_BOOTSTRAP = "/pyalloc/_bootstrap/"
_OWN_CALL = re.compile(rf"{_BOOTSTRAP}|/torch/_ops\.py$")  # and torch's, between them
_GRAPH = "<eval_with_key>"
_ENGINE = "torch::autograd::Engine::"
_AUTOGRAD: Frame = (f"{_ENGINE}thread_main", "", 0)
# Torch's own functions: losses, softmax, distributions.  What they do inside is not the program's to write otherwise.
_OF_TORCH = re.compile(r"/torch/(nn|optim|distributions|functional\.py$)")
_BACKWARD = re.compile(r"/torch/autograd/(__init__|graph)\.py$")
_PRODUCT = re.compile(
    r"@|m[mv]\(|dot\(|matmul|linear|einsum|attention|lstm|gru|rnn|inner\(|cdist|matrix_power|triangular|pinv"
    r"|lstsq|cov\(|corrcoef",
    re.IGNORECASE,
)
_OVERRIDES = ("__torch_function__", "__torch_dispatch__")  # of modes and subclasses of tensors
# Torch's way to a kernel: in 2.14 bmm(), sum(), norm() and some others are looked at in Python first.
_ROUTE = re.compile(r"/torch/(_ops\.py$|_native/)")
_WORKSPACE = re.compile(
    r"at::cuda::(get(NewWorkspace|CUDABlasLtWorkspace|CurrentCUDABlasHandle)|allocateCUDABlasWorkspace)\b"
)
_OPTIMIZER = re.compile(r"/torch/optim/(\w+)\.py$")
_SPELLED = {  # classes that are not their file's name with a capital
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
    """A line of code.  function: qualified where the source is at hand."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """For example `examples/seq2seq.py:63 AdditiveAttention.forward`."""
        return f"{short_file(self.file)}:{self.line} {self.function}"


_named: dict[str, str] = {}  # files that a person knows by another name


def name_files(names: dict[str, str]) -> None:
    """From now on these files are called so: a notebook's cells have names made of a number of IPython's."""
    _named.update(names)


def short_file(file: str) -> str:
    """The last two parts of a path; of what torch.compile wrote as much as tells it from others."""
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


def is_cpp(file: str) -> bool:
    """Is this code in C or C++, or that of the interpreter?"""
    return bool(_CPP.search(file))


def _lines(file: str) -> list[str]:
    """Of a source file.  Its name comes from a trace: a device or a pipe of that name is not to be read."""
    is_source = file in linecache.cache or (file.endswith(".py") and os.path.isfile(file))
    return linecache.getlines(file) if is_source else []


@functools.cache
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, qualified name) of each function of a file; nothing where it cannot be read."""
    found: list[tuple[int, int, str]] = []
    # Not by recursion: a sum of a thousand terms is a thousand deep.
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
    """Empty where it cannot be read."""
    try:
        return ast.parse("".join(_lines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last of what is too deep
        return ast.Module([], [])


def statements_around(where: Place) -> list[ast.stmt]:
    """Those without others inside, of the function that has the line, or of the module; in their order."""
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
    """May it be part of a call of pyalloc's own: that, torch's way to it, and what of C++ lies among these."""
    return bool(_OWN_CALL.search(file)) or is_cpp(file)


def without_bootstrap(frames: list[Frame]) -> list[Frame]:
    """Those of the program: a dry run has kernels in Python, also on autograd's threads, where nothing else is."""
    kept: list[Frame] = []
    for _, group in itertools.groupby(frames, lambda frame: _is_between(frame[1])):
        calls = list(group)
        if any(_BOOTSTRAP in file for _, file, _ in calls):
            calls = [frame for frame in calls if is_cpp(frame[1])]
        kept += calls
    return kept or [_AUTOGRAD] * bool(frames)


def place(frames: tuple[Frame, ...]) -> Place | None:
    """The innermost line of the user's own code; else of torch.compile's graph, or of Python; None without frames."""
    for name, file, line in frames:
        # "<string>" is code that libraries make, too; but its <module> is the program of `python -c`
        if not is_foreign(file) or (file, name) == ("<string>", "<module>"):
            return Place(file, line, qualified(file, line, name))
    for _, file, line in frames:
        # Run as it is: autograd's threads do so, where nothing of the user's is.
        if file.startswith(_GRAPH):
            is_backward = any(n == "backward" and "/_aot_autograd/" in f for n, f, _ in frames)
            graph = f"torch.compile/graph{file.removeprefix(_GRAPH)}"
            return Place(graph, line, "backward" if is_backward else "forward")
    files = [frame for frame in frames if frame[1].endswith(".py")]
    for name, file, line in (*(f for f in files if not _ROUTE.search(f[1])), *files):
        return Place(file, line, name)
    return None


def nameless(frames: tuple[Frame, ...], phase: str) -> str:
    """What is known where no line of Python is; phase: the one it was asked for in."""
    is_backward = phase == "backward" or is_autograd(frames)
    return "backward (no Python stack)" if is_backward else "(no stack)"


def name(frames: tuple[Frame, ...], phase: str = "") -> str:
    """The line of the user's code, or what is known where there is none."""
    return str(place(frames) or nameless(frames, phase))


def inside(frames: tuple[Frame, ...]) -> Place | None:
    """The innermost line of a library built on torch that the user's own line led to; None if that is torch itself."""
    for name, file, line in frames:
        if not is_foreign(file):
            return None
        if file.endswith(".py") and _BUILT_ON_TORCH.search(file):
            return Place(file, line, qualified(file, line, name))
    return None


def optimizer(frames: tuple[Frame, ...]) -> str:
    """The optimizer whose code is in the stack ("Adam"), or ""."""
    for _, file, _ in frames:
        match = _OPTIMIZER.search(file)
        if match and match.group(1) not in _NO_OPTIMIZER:
            return _SPELLED.get(match.group(1), match.group(1).capitalize())
    return ""


def is_autograd(frames: tuple[Frame, ...]) -> bool:
    """A thread of torch's autograd, in which no Python runs; known where C++ frames were recorded."""
    return any(name.startswith(_ENGINE) for name, _, _ in frames)


def is_backward(frames: tuple[Frame, ...]) -> bool:
    """Is this autograd at work: a thread of its own, without a stack in Python, or what it prepares?"""
    return not frames or is_autograd(frames) or any(_BACKWARD.search(f) for _, f, _ in frames)


def is_checkpoint(frames: tuple[Frame, ...]) -> bool:
    """Does torch.utils.checkpoint run it?"""
    return any(file.endswith("/torch/utils/checkpoint.py") for _, file, _ in frames)


def is_loaded(frames: tuple[Frame, ...]) -> bool:
    """Does torch.load() bring it to the device?"""
    return any(name == "load" and f.endswith("/torch/serialization.py") for name, f, _ in frames)


def is_cublas(frames: tuple[Frame, ...]) -> bool:
    """Does torch make cuBLAS its workspace here?  Known where C++ frames were recorded."""
    return any(_WORKSPACE.match(name) for name, _, _ in frames)


def is_compiled(frames: tuple[Frame, ...]) -> bool:
    """Is it of what torch.compile wrote?"""
    return any(re.search(_COMPILED, file) for _, file, _ in frames)


def is_matrix_product(frames: tuple[Frame, ...]) -> bool | None:
    """Does the innermost line call one, or a kernel for one in what torch.compile wrote?  None: that is not at hand."""
    for name, file, line in frames:
        if re.search(_COMPILED, file):
            text = text_of(Place(file, line, name))
            return "extern_kernels" in text if text else None
    # A subclass of tensors (nested ones, DTensors) has the operator within its override, by no name of its own.
    overrides = [i for i, (name, _, _) in enumerate(frames) if name in _OVERRIDES]
    return any(_is_product(frames[i:]) for i in (0, *(i + 1 for i in overrides[-1:])))


def _is_product(frames: tuple[Frame, ...]) -> bool:
    for name, file, line in frames:
        if is_cpp(file) or _ROUTE.search(file) or name in _OVERRIDES:
            continue
        is_linear = name == "forward" and file.endswith("/torch/nn/modules/linear.py")
        return is_linear or bool(_PRODUCT.search(text_of(Place(file, line, name))))
    return False


def is_torchs(frames: tuple[Frame, ...]) -> bool:
    """Does one of torch's own functions in Python do it, and not the line that calls it?"""
    innermost = next((f for _, f, _ in frames if not is_cpp(f) and not _ROUTE.search(f)), "")
    return bool(_OF_TORCH.search(innermost))


def text_of(where: Place) -> str:
    """The source line, where it can be read."""
    lines = _lines(where.file)
    return lines[where.line - 1].strip() if 0 < where.line <= len(lines) else ""

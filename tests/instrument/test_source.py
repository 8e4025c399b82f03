"""From stacks to names that a person knows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pyalloc
from pyalloc._bootstrap import asking
from pyalloc.traces import source

PROGRAM = """\
class Model:
    def forward(self, x):
        def attend(y):
            return y @ y
        return attend(x)

def train():
    return [Model().forward(i) for i in range(3)]
"""
LIBRARIES = "/usr/lib/python3/dist-packages"


@pytest.mark.parametrize(
    ("line", "name", "qualified"),
    [
        (2, "forward", "Model.forward"),
        (4, "attend", "Model.forward.attend"),
        (5, "forward", "Model.forward"),
        (8, "train", "train"),
        (8, "<listcomp>", "train"),
        (4, "other", "other"),  # the file has changed
        (99, "forward", "forward"),
    ],
)
def test_functions_have_the_names_of_what_they_are_in(
    tmp_path: Path, line: int, name: str, qualified: str
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    assert source.qualified(str(path), line, name) == qualified


@pytest.mark.parametrize(
    "text",
    [
        f"def train():\n    return {' + '.join(['1'] * 1500)}\n",
        "def train():\n    if x == 0: pass\n" + "    elif x: pass\n" * 1200,
    ],
)
def test_what_is_nested_deeply_has_its_function_all_the_same(tmp_path: Path, text: str) -> None:
    """Like generated formulas: Python reads them, but cannot walk them by recursion."""
    path = tmp_path / "program.py"
    path.write_text(text)
    assert source.qualified(str(path), 2, "train") == "train"
    assert source.qualified(str(path), 2, "<listcomp>") == "train"


@pytest.mark.parametrize("formula", ["not " * 7000 + "x", " + ".join(["x"] * 20_000), "x +"])
def test_code_that_cannot_be_gone_through_is_no_error(tmp_path: Path, formula: str) -> None:
    """Python's parser has limits of its own; a program in a dry run would get their error."""
    path = tmp_path / "program.py"
    path.write_text(f"def train():\n    return {formula}\n")
    assert source.qualified(str(path), 2, "<listcomp>") == "<listcomp>"
    assert not list(ast.iter_child_nodes(asking._tree(str(path))))


@pytest.mark.parametrize(
    ("python", "folder"),
    [("python3.11", "lib"), ("python3.14t", "lib"), ("python3.12", "lib64")],
)
def test_pythons_own_files_are_not_the_users(python: str, folder: str) -> None:
    """Free-threaded Python has a t behind its version, Fedora's and openSUSE's Python lies in lib64."""
    library = ("inner", f"/usr/{folder}/{python}/contextlib.py", 80)
    interpreter = ("_PyEval_Vector", f"/usr/bin/{python}", 0)
    user = ("train", "/my/train.py", 3)
    assert source.place((interpreter, library, user)) == source.Place("/my/train.py", 3, "train")
    assert source.is_cpp(interpreter[1]) and not source.is_cpp(library[1])


def test_a_line_is_the_innermost_of_the_program_and_of_the_library_below_it() -> None:
    frames = (
        ("allocate", "/torch/csrc/cuda.cpp", 1),
        ("empty", f"{LIBRARIES}/torch/functional.py", 2),
        ("forward", f"{LIBRARIES}/diffusers/unet.py", 3),
        ("call", f"{LIBRARIES}/diffusers/pipeline.py", 4),
        ("step", "/home/me/run/train.py", 5),
        ("main", "/home/me/run/train.py", 6),
    )
    assert str(source.place(frames)) == "run/train.py:5 step"
    assert str(source.inside(frames)) == "diffusers/unet.py:3 forward"
    assert source.inside(frames[:2]) is None
    assert str(source.place(frames[:2])) == "torch/functional.py:2 empty"  # no line of the user's
    assert source.place(frames[:3]) == source.inside(frames)  # autograd's threads: a checkpoint
    assert source.place(frames[:1]) is None
    assert source.place((("<module>", "<string>", 1),)) is not None  # python -c
    assert source.place((("made", "<string>", 1),)) is None


@pytest.mark.parametrize("override", ["__torch_function__", "__torch_dispatch__"])
def test_what_passes_a_call_on_is_no_line_of_a_library(override: str) -> None:
    """Every operator on a tensor of MONAI's comes through its class, which knows nothing of who called."""
    tensor = (override, f"{LIBRARIES}/monai/meta_tensor.py", 1)
    way = ("_convert", f"{LIBRARIES}/torch/_tensor.py", 2)
    loss = ("forward", f"{LIBRARIES}/monai/dice.py", 3)
    user = ("main", "/home/me/run/train.py", 4)
    assert str(source.inside((tensor, way, loss, user))) == "monai/dice.py:3 forward"
    assert source.inside((tensor, way, user)) is None  # the program's own operator
    assert str(source.place((tensor, way, loss))) == "monai/dice.py:3 forward"  # on another thread
    assert str(source.place((tensor,))) == f"monai/meta_tensor.py:1 {override}"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("adamw", "AdamW"),
        ("_muon", "Muon"),
        ("rprop", "Rprop"),
        ("optimizer", ""),
        ("lr_scheduler", ""),
    ],
)
def test_optimizers_are_named_as_their_classes(file: str, name: str) -> None:
    frames = (("step", f"{LIBRARIES}/torch/optim/{file}.py", 1), ("main", "/home/me/x.py", 2))
    assert source.optimizer(frames) == name
    closure = ("closure", "/home/me/x.py", 1)
    assert source.optimizer((closure, *frames)) == ""  # which computes the loss in the step


def test_calls_of_a_dry_runs_kernels_are_no_lines_of_the_program() -> None:
    """Also between frames of C++; those stay, because they mark autograd's threads."""
    own = ("launch", "/env/pyalloc/_bootstrap/creating.py", 7)
    way = ("__call__", f"{LIBRARIES}/torch/_ops.py", 916)
    native = ("torch::jit::invoke", "/env/torch/lib/libtorch_python.so", 0)
    engine = ("torch::autograd::Engine::thread_main", "/env/torch/lib/libtorch_cpu.so", 0)
    model = ("forward", "/home/me/model.py", 3)
    assert source.without_bootstrap([native, way, native, own, native, way, engine]) == [
        native, native, native, engine,
    ]  # fmt: skip
    assert source.without_bootstrap([native, way, own, model]) == [native, model]
    alone = tuple(source.without_bootstrap([own, way, own]))
    assert source.name(alone) == "backward (no Python stack)"
    assert source.without_bootstrap([]) == []
    assert source.without_bootstrap([native, way, engine, model, own]) == [
        native,
        way,
        engine,
        model,
    ]


@pytest.mark.parametrize("folder", [LIBRARIES, "/home/me/work"])
def test_what_pyalloc_requests_is_for_the_line_that_calls_it(folder: str) -> None:
    """Also where pyalloc is in its own folder, as after `pip install -e`: its own lines were named."""
    model = ("forward", "/home/me/model.py", 3)
    package = Path(pyalloc.__file__).parent
    files = [path.relative_to(package) for path in package.rglob("*.py")]
    assert {Path("adapters.py"), Path("inside/automarks.py"), Path("ops/_plans.py")} < {*files}
    for file in files:
        frames = ("maker", f"{folder}/pyalloc/{file}", 87), model
        assert source.name(frames) == "me/model.py:3 forward"


def test_programs_in_a_folder_named_pyalloc_are_the_users() -> None:
    for file in ("examples/seq2seq.py", "benchmarks/training.py", "train.py"):
        assert not source.is_foreign(f"/home/me/pyalloc/{file}")


def test_a_kernel_that_torch_looks_for_in_python_is_its_callers() -> None:
    router = ("eager_router", "/x/site-packages/torch/_native/registry.py", 958)
    default_device = ("__torch_function__", "/x/site-packages/torch/utils/_device.py", 122)
    norm = ("norm", "/x/site-packages/torch/functional.py", 1900)
    for way in router, default_device:
        assert source.is_torchs((way, norm))
        assert not source.is_torchs((way, ("work", "/home/me/model.py", 3)))


def test_where_nothing_is_the_users_torchs_way_to_a_kernel_is_the_last_to_be_named() -> None:
    router = ("eager_router", "/x/site-packages/torch/_native/registry.py", 958)
    extension = ("weight", "/x/site-packages/backpack/hbp/linear.py", 66)
    assert source.name((router, extension)) == "hbp/linear.py:66 weight"
    assert source.name((router,)) == "_native/registry.py:958 eager_router"


def test_a_backward_pass_within_one_is_no_line_of_torchs() -> None:
    """A reentrant checkpoint's, on a thread of autograd's."""
    engine = ("_engine_run_backward", "/x/site-packages/torch/autograd/graph.py", 1072)
    within = ("backward", "/x/site-packages/torch/utils/checkpoint.py", 321)
    frames = (engine, within, ("apply", "/x/site-packages/torch/autograd/function.py", 300))
    assert source.place(frames) is None
    assert source.nameless(frames, "") == "backward (no Python stack)"
    line = ("main", "/home/me/train.py", 7)
    assert str(source.place((engine, line))) == "me/train.py:7 main"


def test_the_modes_of_torch_that_a_call_passes_are_its_way_to_a_kernel_too() -> None:
    """As in the backward of a function that torch.compile captures in CUDA graphs."""
    torch = "/x/site-packages/torch"
    modes = (
        ("__call__", f"{torch}/_ops.py", 916),
        ("__torch_dispatch__", f"{torch}/_higher_order_ops/cudagraph_conditional_nodes.py", 118),
        ("_fn", f"{torch}/_dynamo/eval_frame.py", 1548),
        ("inner", f"{torch}/_compile.py", 54),
        ("__torch_function__", f"{torch}/utils/_device.py", 122),
    )
    timing = ("benchmark_gpu", f"{torch}/_inductor/runtime/benchmarking.py", 716)
    assert source.name((*modes, timing)) == "runtime/benchmarking.py:716 benchmark_gpu"
    own = ("__torch_dispatch__", "/x/site-packages/torchao/int8.py", 9)
    assert source.name((modes[0], own)) == "torchao/int8.py:9 __torch_dispatch__"

"""install(): torch's CUDA memory comes from pyalloc from then on."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pyalloc import _core
from pyalloc._bootstrap.importing import after_import
from pyalloc.common.config import ENVIRONMENT, TORCH_CONF, Config, Value
from pyalloc.common.folding import folded
from pyalloc.errors import ConfigError, InstallError
from pyalloc.inside import hooks

NO_DEVICE = "torch sees no CUDA device"
_NO_TORCH = "torch is not installed"
_NO_CUDA = "this torch was built without CUDA"
_INSTALL = "install the CUDA build: pip install torch"
_THEN = {  # what can be done about it
    NO_DEVICE: "to try a program without a GPU: pyalloc dryrun python your_script.py",
    _NO_TORCH: _INSTALL,
    _NO_CUDA: _INSTALL,
}
_TOO_LATE = (
    "CUDA was already used in this process (torch.cuda.init() is enough), so torch's allocator cannot be replaced any "
    "more. Call pyalloc.install() before the first CUDA call (right after `import torch`), "
    "or start the program with `pyalloc run python your_script.py`; in a notebook restart the kernel first."
)
_NCCL_GRAPHS = "NCCL_GRAPH_REGISTER"  # NCCL reads it at the first captured collective
_NOT_OURS = (
    "torch already has another allocator (set with torch.cuda.memory.change_current_allocator, as RMM does), and a "
    "process can have only one. Remove that call, or do not install pyalloc."
)


@dataclass(frozen=True, repr=False)
class Status:
    """The state of the installation; str() and repr() of it are a few readable lines.

    reason: why pyalloc is installed or not.
    config: the settings in effect; if not installed, those that install() would use.
    features: (name, whether it works, detail) for each thing looked up in torch.
    replaced: torch functions that pyalloc answers in place of torch.
    without_effect: settings of torch's own allocator in the environment, as (variable, key, value).
    allocations, frees, refused_frees: requests served and blocks freed so far; frees of addresses without a live block.
    """

    installed: bool
    reason: str
    config: Config
    torch_version: str | None
    features: tuple[tuple[str, bool, str], ...]
    replaced: tuple[str, ...]
    without_effect: tuple[tuple[str, str, str], ...]
    allocations: int
    frees: int
    refused_frees: int

    def __str__(self) -> str:
        """A few lines for a person, in 80 columns but for a file's name."""
        return "\n".join(
            line if line.startswith("plan: ") else folded(line) for line in self.lines()
        )

    def lines(self) -> list[str]:
        """The same, each as long as it is."""
        word = "installed" if self.installed else "not installed"
        torch = f"torch {self.torch_version}" if self.torch_version else "torch is not imported"
        lines = [
            f"pyalloc is {word} ({self.reason}), {torch}",
            "settings: "
            + ", ".join(f"{option.name}:{option.value}" for option in self.config.options),
            *([f"plan: {self.config.plan}"] if self.config.plan else []),
            f"torch made {_counted(self.allocations, 'allocation')} and {_counted(self.frees, 'free')}",
        ]
        if self.refused_frees:
            lines.append(
                f"refused: {_counted(self.refused_frees, 'free')} of addresses without a live block"
            )
        lines += [
            f"  {'ok ' if works else 'NO '} {what}: {detail}"
            for what, works, detail in self.features
            if self.installed  # before, nothing was looked up
        ]
        lines += [f"replaced: {', '.join(self.replaced)}"] if self.replaced else []
        if self.installed and self.without_effect:
            asked = ", ".join(f"{name}={key}:{value}" for name, key, value in self.without_effect)
            lines.append(f"settings of torch's own allocator, without effect here: {asked}")
        return lines

    __repr__ = __str__


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


@dataclass
class _State:
    """The one installation of this process."""

    config: Config | None = None
    reason: str = "install() was not called"
    installed: bool = False
    replacements: hooks.Replacements = field(default_factory=hooks.Replacements)
    missing: list[str] = field(default_factory=list)
    told: bool = False
    plain_graphs: bool = False
    by_run: bool = False  # `pyalloc run` installed it, not the program
    keeps_nccl: bool = False  # we set _NCCL_GRAPHS


_state = _State()
_lock = threading.RLock()  # one thread at a time changes _state, and torch


def _forget_owner() -> None:
    """Makes a new lock in a forked child: the thread that held the old one does not exist there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_owner)


class Handle:
    """What install() returns: shows the state of the installation, or undoes it before CUDA is used."""

    def status(self) -> Status:
        """The same as `pyalloc.status()`."""
        return status()

    def uninstall(self) -> None:
        """The same as `pyalloc.uninstall()`."""
        uninstall()

    def __repr__(self) -> str:
        """One line."""
        return f"<pyalloc {'installed' if _state.installed else 'not installed'}: {_state.reason}>"


def install(*, plan: str | os.PathLike[str] | None = None, **options: Value) -> Handle:
    """Makes pyalloc torch's CUDA allocator in this process; call it before the first CUDA call.

    It may be called before or after `import torch`, and again with the same settings.  If torch is missing, was built
    without CUDA, or sees no device, nothing is changed, and a warning says so once.

    Args:
        plan: a file that `pyalloc plan` wrote; None for the one that the environment variable PYALLOC_PLAN names, if
            it is set.
        **options: settings that override those in the environment variable PYALLOC_CONF; `pyalloc doctor` lists them.

    Returns:
        A handle with `status()` and `uninstall()`.

    Raises:
        ConfigError: a setting is unknown or malformed.
        PlanError: the plan's file is missing or damaged.
        InstallError: CUDA was already used, torch has another allocator, pyalloc is installed with other settings, or
            this is a subinterpreter.
    """
    if not _core.is_main_interpreter():
        raise InstallError(
            "this is a subinterpreter; install pyalloc from the main interpreter, for the whole process"
        )
    try:
        _install(Config.of(plan=plan, **options))
    except BaseException as error:
        if not _state.installed:
            _state.reason = f"install() failed: {error}"
        raise
    return Handle()


def _install(config: Config) -> None:
    # Import without our lock: under `pyalloc run` the import itself may call install(), with Python's import lock held.
    torch = _import_torch()
    with _lock:
        _install_in(torch, config)


def _install_in(torch: Any, config: Config) -> None:
    if _is_installed_as(config):
        return
    if torch is None or not _has_cuda(torch):
        _say_once()
        return
    check_torch_settings()
    if torch.cuda.is_initialized():
        raise InstallError(_TOO_LATE)
    plan = _packed_plan(config)
    try:  # Ctrl-C may come anywhere in here
        _core.create(config.text, plan)
        _register(torch)
        _core.torch_take_slots()
        _core.torch_set_cached(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1")
        hooks.replace_all(torch, config, _state.replacements)
        _state.config = config
        _state.installed = True
        _state.reason = "active"
        _state.by_run = False
        _prepare_compiler()
        _keep_nccl_from_registering(config)
        _tell_of_settings(config)
    except BaseException:
        _core.torch_detach()
        _forget()
        raise


def _packed_plan(config: Config) -> bytes | None:
    if not config.plan:
        return None
    from pyalloc import planning  # most programs have none

    return planning.read(Path(config.plan)).packed()


def _is_installed_as(config: Config) -> bool:
    """Is it installed with these settings?  The program's own settings replace those of `pyalloc run`."""
    if not _state.installed or _state.config is None:
        return False
    if _state.config.is_same(config):
        return True
    if _state.by_run and not _is_in_use():
        uninstall()
        return False
    differences = "; ".join(_state.config.differences(config))
    raise InstallError(
        f"pyalloc is already installed with other settings ({differences}). "
        "Settings are chosen once per process: give them at the first install() "
        "(in a notebook restart the kernel)."
    )


def install_when_torch_is_imported() -> None:
    """As install(), but without importing torch: at once where it is loaded, else as soon as the program loads it.

    `pyalloc run` uses it in processes that may never need torch.
    """

    def install_by_run(_torch: ModuleType) -> None:
        _state.by_run = True  # until a program's own install()
        install()
        _state.by_run = True

    Config.of()  # mistakes are reported now, not at some later import
    after_import("torch", install_by_run)


def uninstall() -> None:
    """Gives torch its own allocator back, which is possible until the first CUDA call.

    Raises:
        InstallError: CUDA is already in use.
    """
    with _lock:
        _uninstall()


def _uninstall() -> None:
    if not _state.installed:
        return
    if _is_in_use():
        raise InstallError(
            "CUDA is in use, and tensors may live in pyalloc's memory, so it cannot be removed any more. "
            "Start a new process without pyalloc instead."
        )
    if not _core.torch_detach():
        raise InstallError(
            "torch's own allocator could not be restored. Start a new process without pyalloc instead."
        )
    _forget()
    _state.reason = "uninstalled"


def _forget() -> None:
    """Undoes what an installation changed besides torch's choice of allocator."""
    _state.replacements.undo()
    _core.destroy()
    if _state.keeps_nccl and os.environ.get(_NCCL_GRAPHS) == "0":  # not since set by the program
        del os.environ[_NCCL_GRAPHS]
    _state.keeps_nccl = False
    _state.config = None
    _state.installed = False


def _is_in_use() -> bool:
    import torch

    return torch.cuda.is_initialized() or _core.torch_initialized()


def status() -> Status:
    """Returns what is installed, what works and what does not; print() it for a few readable lines.

    If nothing is installed and the environment names a setting that does not exist, the reason says so.
    """
    torch = sys.modules.get("torch")
    config, reason = _state.config, _state.reason
    try:
        config = config or Config.of()
    except ConfigError as error:
        config = Config()
        reason += f"; {error}" * (str(error) not in reason)
    allocations, frees, refused = _core.counts()
    features = tuple(_core.torch_features()) + tuple(
        (name, False, "torch has no such setter") for name in _state.missing
    )
    if _state.plain_graphs:
        features += (
            ("torch.compile(mode='reduce-overhead')", True, "plain CUDA graphs, no trees"),
        )
    if _state.config and _has_pages(_state.config) and os.environ.get(_NCCL_GRAPHS) == "0":
        features += (("NCCL in CUDA graphs", True, f"copies buffers ({_NCCL_GRAPHS}=0)"),)
    return Status(
        installed=_state.installed,
        reason=reason,
        config=config,
        torch_version=str(torch.__version__) if torch is not None else None,
        features=features,
        replaced=_state.replacements.names(),
        without_effect=tuple(_without_effect()),
        allocations=allocations,
        frees=frees,
        refused_frees=refused,
    )


def _import_torch() -> ModuleType | None:
    try:
        import torch
    except ImportError:
        _state.reason = _NO_TORCH
        return None
    return torch  # type: ignore[no-any-return]


def _has_cuda(torch: Any) -> bool:
    if torch.version.cuda is None:
        _state.reason = _NO_CUDA
        return False
    # Not is_available(): it may start CUDA in this process, and forked workers could not use CUDA then.
    if torch.cuda.device_count() == 0:
        _state.reason = NO_DEVICE
        return False
    return True


def _say_once() -> None:
    if _state.told:
        return
    _state.told = True
    why = _state.reason
    if why in _THEN:
        why += f"; {_THEN[why]}"
    if _state.by_run:
        # No warning: the program's filters may turn it into an error, and `import torch` would fail.
        print(f"pyalloc: not installed: {why}", file=sys.stderr)
    else:
        warnings.warn(f"pyalloc.install() did nothing: {why}", RuntimeWarning, stacklevel=5)


def _torch_settings() -> Iterator[tuple[str, str, str]]:
    """(variable, key, value) of the settings of torch's own allocator in the environment."""
    for name in TORCH_CONF:
        # A value may be a bracketed list that contains commas and colons.
        for part in re.findall(r"(?:\[[^]]*\]|[^,])+", os.environ.get(name, "")):
            key, _, value = part.partition(":")
            yield name, key.strip(), value.strip()


def check_torch_settings() -> None:
    """Raises InstallError if the environment names another allocator, even one that torch does not know."""
    for name, key, value in _torch_settings():
        if key == "backend":
            raise InstallError(
                f"{name} sets backend:{value}, which cannot be combined with pyalloc. Remove it, or do not install "
                "pyalloc."
            )


def _without_effect() -> Iterator[tuple[str, str, str]]:
    """Settings of torch's allocator of device memory; those of pinned host memory stay torch's business."""
    return (each for each in _torch_settings() if not each[1].startswith("pinned"))


def _has_pages(config: Config) -> bool:
    return any(option.name == "vmm" and option.value == "True" for option in config.options)


def _keep_nccl_from_registering(config: Config) -> None:
    """Switches NCCL's registration of captured buffers off, unless the environment sets it.

    NCCL opens the buffers of a captured collective to the other ranks if each lies in one allocation of the driver.
    With memory made of pages that may differ between ranks, which then wait for each other forever.
    """
    if _has_pages(config) and _NCCL_GRAPHS not in os.environ:
        _state.keeps_nccl = True
        os.environ[_NCCL_GRAPHS] = "0"


def _tell_of_settings(config: Config) -> None:
    """Warns once about settings of torch that pyalloc has, too, but does not take over; others are not needed."""
    ours = {option.name for option in config.options}
    for name, key, value in {each[1]: each for each in _without_effect()}.values():
        if key not in ours or f"{key}:" in config.text:
            continue
        try:
            how = Config(f"{key}:{value}").text
        except ConfigError:  # the same name, another form
            how = f"{key}:... (`pyalloc doctor` lists the values)"
        logging.getLogger("pyalloc").warning(
            f"{name}={key}:{value} sets torch's own allocator only; for pyalloc set {ENVIRONMENT}={how}"
        )


def _register(torch: Any) -> None:
    """Gives torch our allocator.

    Raises:
        InstallError: torch has another, or takes none, or not in a way that is known here.
    """
    try:
        _register_as_known(torch)
    except (AttributeError, TypeError) as error:
        raise InstallError(
            f"this pyalloc does not know how torch {torch.__version__} accepts other allocators ({error}). "
            "Use a newer pyalloc, or a torch version that its README lists."
        ) from error


def _register_as_known(torch: Any) -> None:
    import ctypes  # torch has imported it

    memory = torch.cuda.memory
    allocator = memory.CUDAPluggableAllocator(_core.__file__, "pya_torch_alloc", "pya_torch_free")
    inner = allocator.allocator()
    addresses = _core.torch_attach()
    _state.missing = [setter for setter in addresses if not hasattr(inner, setter)]
    for setter, address in addresses.items():
        if setter not in _state.missing:
            getattr(inner, setter)(address)
    try:
        memory.change_current_allocator(allocator)
    except RuntimeError as error:
        is_theirs = torch.cuda.get_allocator_backend() == "pluggable"
        why = _NOT_OURS if is_theirs else f"torch rejected the allocator: {error}. {_TOO_LATE}"
        raise InstallError(why) from error
    # Keep a reference forever: older torch drops the allocator at exit, and then still frees shared memory through it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


def _prepare_compiler() -> None:
    """Makes torch.compile(mode="reduce-overhead") use plain CUDA graphs if trees of graphs are not possible.

    Trees set the allocator back to earlier states, through methods that are looked up in torch's libraries.
    """
    name = "torch._inductor.config"
    if _core.torch_has_slots("CUDA-graph trees"):
        return

    def use_plain_graphs(config: Any) -> None:
        if _state.installed and getattr(config.triton, "cudagraph_trees", False):
            config.triton.cudagraph_trees = False
            _state.plain_graphs = True
            logging.getLogger("pyalloc").warning(
                "torch.compile uses plain CUDA graphs under pyalloc: torch._inductor.config.triton.cudagraph_trees "
                "was switched off and must stay off"
            )

    after_import(name, use_plain_graphs)

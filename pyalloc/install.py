"""install(): torch's CUDA memory comes from pyalloc from then on."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from pyalloc import _core, hooks
from pyalloc.config import Config, Value
from pyalloc.errors import InstallError

_TOO_LATE = (
    "CUDA was already used in this process, so torch's own allocator holds memory and cannot be replaced. "
    "Call pyalloc.install() before the first CUDA call (right after `import torch`), "
    "or start the program with `pyalloc run python your_script.py`."
)


@dataclass(frozen=True)
class Status:
    """What is installed; str() of it is what `pyalloc.status()` is meant to be printed as.

    features: (what, does it work, detail) of each thing looked up in torch.
    replaced: torch functions that pyalloc answers instead of torch.
    """

    installed: bool
    reason: str
    config: Config
    torch_version: str | None
    features: tuple[tuple[str, bool, str], ...]
    replaced: tuple[str, ...]
    allocations: int
    frees: int
    refused_frees: int

    def __str__(self) -> str:
        """A few lines for a person."""
        word = "installed" if self.installed else "not installed"
        lines = [
            f"pyalloc is {word} ({self.reason}), torch {self.torch_version}",
            "settings: "
            + ", ".join(f"{option.name}:{option.value}" for option in self.config.options),
            f"torch made {self.allocations} allocations and {self.frees} frees, {self.refused_frees} refused",
        ]
        lines += [
            f"  {'ok ' if works else 'NO '} {what}: {detail}"
            for what, works, detail in self.features
        ]
        lines += [f"replaced: {', '.join(self.replaced)}"] if self.replaced else []
        return "\n".join(lines)


@dataclass
class _State:
    """The one installation of this process."""

    config: Config | None = None
    reason: str = "install() was not called"
    installed: bool = False
    replacements: hooks.Replacements | None = None
    missing: list[str] = field(default_factory=list)
    told: bool = False
    plain_graphs: bool = False


_state = _State()


class Handle:
    """What install() returns: look at the installation, or take it back before CUDA is used."""

    def status(self) -> Status:
        """The same as `pyalloc.status()`."""
        return status()

    def uninstall(self) -> None:
        """The same as `pyalloc.uninstall()`."""
        uninstall()

    def __repr__(self) -> str:
        """One line."""
        return f"<pyalloc {'installed' if _state.installed else 'not installed'}: {_state.reason}>"


def install(**options: Value) -> Handle:
    """Makes torch take CUDA memory from pyalloc, in this process, before its first CUDA call.

    May be called before or after `import torch`, and again with the same settings.  Where torch is missing, or was
    built without CUDA, or sees no device, nothing is changed, and a warning says so once.

    Args:
        **options: settings, overriding those of the environment variable PYALLOC_CONF; `pyalloc doctor` lists them.

    Returns:
        A handle with `status()` and `uninstall()`.

    Raises:
        ConfigError: a setting is unknown or malformed.
        InstallError: CUDA was used before, another allocator was chosen, pyalloc is installed with other settings, or
            this is a subinterpreter.
    """
    if not _core.is_main_interpreter():
        raise InstallError(
            "pyalloc is installed from the main interpreter, for the whole process; this is a subinterpreter"
        )
    config = Config.of(**options)
    if _state.installed and _state.config is not None:
        if not _state.config.is_same(config):
            differences = "; ".join(_state.config.differences(config))
            raise InstallError(
                f"pyalloc is already installed with other settings ({differences}). "
                "Settings are chosen once per process: give them at the first install()."
            )
        return Handle()
    torch = _import_torch()
    if torch is None or not _has_cuda(torch):
        _say_once()
        return Handle()
    _check_not_taken(torch)
    _core.create(config.text)
    try:
        _register(torch)
    except BaseException:
        _core.destroy()
        raise
    _core.torch_take_slots()
    _core.torch_set_cached("PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ)
    _state.replacements = hooks.replace_all(torch)
    _state.config = config
    _state.installed = True
    _state.reason = "active"
    _prepare_compiler()
    return Handle()


def install_when_torch_is_imported(**options: Value) -> None:
    """As install(), but without importing torch: at once where it is loaded, else as soon as the program loads it.

    `pyalloc run` uses it in processes that may never need torch.
    """
    if "torch" in sys.modules:
        install(**options)
        return
    Config.of(**options)  # mistakes are reported now, not at some later import
    _after_import("torch", lambda: install(**options))


def uninstall() -> None:
    """Gives torch its own allocator back; possible until the first CUDA call.

    Raises:
        InstallError: CUDA memory was already handed out.
    """
    if not _state.installed:
        return
    import torch

    if torch.cuda.is_initialized() or _core.torch_initialized():
        raise InstallError(
            "CUDA is in use, so tensors live in pyalloc's memory and it cannot be removed any more. "
            "Start a new process without pyalloc instead."
        )
    if not _core.torch_detach():
        raise InstallError(
            "torch's own allocator was not found again. Start a new process without pyalloc instead."
        )
    if _state.replacements is not None:
        _state.replacements.undo()
    _core.destroy()
    _state.replacements = None
    _state.installed = False
    _state.reason = "uninstalled"


def status() -> Status:
    """What is installed, what works and what does not."""
    torch = sys.modules.get("torch")
    allocations, frees, refused = _core.counts()
    features = tuple(_core.torch_features()) + tuple(
        (name, False, "torch has no such setter") for name in _state.missing
    )
    if _state.plain_graphs:
        features += (
            ("torch.compile(mode='reduce-overhead')", True, "plain CUDA graphs, no trees"),
        )
    return Status(
        installed=_state.installed,
        reason=_state.reason,
        config=_state.config or Config.of(),
        torch_version=str(torch.__version__) if torch is not None else None,
        features=features,
        replaced=_state.replacements.names() if _state.replacements is not None else (),
        allocations=allocations,
        frees=frees,
        refused_frees=refused,
    )


def _import_torch() -> ModuleType | None:
    try:
        import torch
    except ImportError:
        _state.reason = "torch is not installed"
        return None
    return torch  # type: ignore[no-any-return]


def _has_cuda(torch: Any) -> bool:
    if torch.version.cuda is None:
        _state.reason = "this torch was built without CUDA"
        return False
    # Not is_available(): that may start CUDA in this process, after which forked workers could not use it.
    if torch.cuda.device_count() == 0:
        _state.reason = "torch sees no CUDA device"
        return False
    return True


def _say_once() -> None:
    if not _state.told:
        _state.told = True
        warnings.warn(
            f"pyalloc.install() did nothing: {_state.reason}", RuntimeWarning, stacklevel=3
        )


def _check_not_taken(torch: Any) -> None:
    if torch.cuda.is_initialized():
        raise InstallError(_TOO_LATE)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "cudaMallocAsync" in os.environ.get(name, ""):
            raise InstallError(
                f"{name} asks for backend:cudaMallocAsync, which cannot be combined with pyalloc. Remove it, or do "
                "not install pyalloc."
            )


def _register(torch: Any) -> None:
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
        raise InstallError(f"torch refused another allocator: {error}. {_TOO_LATE}") from error


def _prepare_compiler() -> None:
    """torch.compile(mode="reduce-overhead"): plain CUDA graphs where trees of them cannot be had.

    The trees return the allocator to earlier states, through methods that are looked for in torch's libraries.
    """
    name = "torch._inductor.config"
    if _core.torch_has_slots("CUDA-graph trees"):
        return

    def use_plain_graphs() -> None:
        config: Any = sys.modules[name]
        if _state.installed and getattr(config.triton, "cudagraph_trees", False):
            config.triton.cudagraph_trees = False
            _state.plain_graphs = True
            logging.getLogger("pyalloc").warning(
                "torch.compile uses plain CUDA graphs under pyalloc (torch._inductor.config.triton.cudagraph_trees "
                "is off); set it again only without pyalloc"
            )

    if name in sys.modules:
        use_plain_graphs()
    else:
        _after_import(name, use_plain_graphs)


def _after_import(name: str, call: Callable[[], object]) -> None:
    """Calls once, right after the module of that name was executed for the first time."""
    from importlib.abc import MetaPathFinder
    from importlib.machinery import ModuleSpec

    class Finder(MetaPathFinder):
        def find_spec(
            self, fullname: str, path: Any, target: ModuleType | None = None
        ) -> ModuleSpec | None:
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            # The other finders, not Python's alone: one of them may wait for the same module.
            found = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
            spec = next((spec for spec in found if spec is not None), None)
            if spec is None or spec.loader is None:
                return spec
            execute = spec.loader.exec_module

            def execute_then_call(module: ModuleType) -> None:
                execute(module)
                call()

            spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())

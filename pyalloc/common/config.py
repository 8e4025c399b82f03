"""Settings: `PYALLOC_CONF=key:value,...`, in the form of PYTORCH_ALLOC_CONF, or keyword arguments of install().

The names, defaults and checks are the C table's (csrc/core/options.h); nothing is repeated here.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path

try:
    from pyalloc import _core
except ImportError as error:
    if importlib.util.find_spec("pyalloc._core") is not None:
        raise
    here = os.path.dirname(os.path.dirname(__file__))
    # In a checkout Python finds this folder before an installed pyalloc; from a zip no extension can be loaded.
    what_next = (
        "to use an installed pyalloc, start Python in another folder; to use this one, build it: pip install -e ."
        if os.path.isdir(here)
        else "it cannot be loaded from a zip file: install pyalloc with pip, or unpack the file into a folder"
    )
    raise ImportError(f"pyalloc's C part is not in {here}: {what_next}") from error
else:
    from pyalloc.common import files, ranked
    from pyalloc.errors import ConfigError

ENVIRONMENT = "PYALLOC_CONF"
PLAN = "PYALLOC_PLAN"  # a file that `pyalloc plan` wrote
# Environment variables with the settings of torch's own allocator, newest name first.
TORCH_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
CUBLAS_CONF = "CUBLAS_WORKSPACE_CONFIG"  # sizes of the workspaces that torch allocates for cuBLAS
CUBLAS_CACHE = "TORCH_CUBLAS_WORKSPACE_CACHE"  # 1: torch keeps the workspaces, from 2.15 on
# Notes in recordings: these sizes as torch reports them, also for cuBLASLt; each size that was set.
CUBLAS_BYTES, CUBLASLT_BYTES = "cublas_workspace", "cublaslt_workspace"
CUBLAS_NOTES = {"Cublas": CUBLAS_BYTES, "CublasLt": CUBLASLT_BYTES}  # by torch's names
ANY_CHAINED = "True"  # instead of lengths, in the note of runs whose passes go on from one another

# What a plan needs, and why.
_PLANNED = (
    ("vmm", "True", "plans place blocks in pages"),
    ("roundup_power2_divisions", "0", "plans hold requests by their exact size"),
)

Value = str | int | float | bool


@dataclass(frozen=True)
class Option:
    """One setting: its name, its value as text, and what it does."""

    name: str
    value: str
    help: str


def _own_plan(file: str) -> str:
    """The plan's file for this rank, if there is one; "" for a launcher if only ranks have plans."""
    path = Path(os.path.abspath(file))
    own = ranked.own(path)
    if os.path.exists(own):  # False for a name that is too long, where Path.exists() raises
        return str(own)
    return "" if not os.path.exists(path) and ranked.existing(path) else str(path)


def option_text(options: dict[str, Value]) -> str:
    """The settings as one text in the form of PYALLOC_CONF.

    Raises:
        ConfigError: a value contains a comma, which would begin another setting.
    """
    for name, value in options.items():
        if "," in str(value):
            raise ConfigError(
                f"option {name!r} cannot be {value!r}: values must not contain commas"
            )
    return ",".join(
        f"{name}:{str(value).lower() if isinstance(value, bool) else value}"
        for name, value in options.items()
    )


def _plan_file(plan: object) -> str:
    """The named file as text.

    Raises:
        ConfigError: it is not a path.
    """
    name = files.name_of(plan)
    if name is None:
        raise ConfigError(f"plan must name a file that `pyalloc plan` wrote, not {plan!r}")
    return name


def environment_text() -> str:
    """The environment's settings.

    Raises:
        ConfigError: they are not; the message says where they stand.
    """
    text = os.environ.get(ENVIRONMENT, "").strip()
    try:
        _core.options(text)
    except ConfigError as error:
        raise ConfigError(f"{ENVIRONMENT}: {error}") from None
    return text


@dataclass(frozen=True)
class Config:
    """Checked settings: `text` as given, `options` as understood, and `plan`, the name of a plan's file or "".

    Raises:
        ConfigError: a name is unknown (the message suggests the nearest known one), a value is malformed, or a plan is
            combined with a setting that rules out plans.
    """

    text: str = ""
    plan: str = ""
    options: tuple[Option, ...] = field(init=False, compare=True)

    def __post_init__(self) -> None:
        """Checks the text against the C table."""
        rows = tuple(Option(*row) for row in _core.options(self.text))
        object.__setattr__(self, "options", rows)
        for name, needed, why in _PLANNED if self.plan else ():
            value = next(option.value for option in rows if option.name == name)
            if value != needed:
                raise ConfigError(
                    f"{name}:{value} cannot be combined with a plan, because {why}; leave one of them out"
                )

    @classmethod
    def of(cls, *, plan: str | os.PathLike[str] | None = None, **options: Value) -> Config:
        """The environment's settings, overridden by the keywords; plan="" means no plan, whatever PYALLOC_PLAN says."""
        parts = [environment_text(), option_text(options)]
        file = os.environ.get(PLAN, "") if plan is None else _plan_file(plan)
        return cls(",".join(part for part in parts if part), _own_plan(file) if file else "")

    def is_same(self, other: Config) -> bool:
        """Whether both mean the same, however they are written."""
        return self.options == other.options and self.plan == other.plan

    def differences(self, other: Config) -> list[str]:
        """What differs, one text per option: "memory: balanced here, tight there"."""
        pairs = zip(self.options, other.options, strict=True)
        found = [f"{a.name}: {a.value}, not {b.value}" for a, b in pairs if a.value != b.value]
        if self.plan != other.plan:
            found.append(f"plan: {self.plan or 'none'}, not {other.plan or 'none'}")
        return found

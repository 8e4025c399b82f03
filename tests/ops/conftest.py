"""The op tests need torch and the library; each CPU test runs under every instruction set there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")


def available_isas() -> list[str]:
    from pyalloc.ops import _library

    names = _library.ISA_NAMES
    return list(names[: _library.library().pya_ops_isa_best() + 1])


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    from pyalloc.ops import cpu_isa, set_cpu_isa

    if request.param not in available_isas():
        pytest.skip(f"this machine or build has no {request.param}")
    before = cpu_isa()
    set_cpu_isa(request.param)
    yield request.param
    set_cpu_isa(before)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20)

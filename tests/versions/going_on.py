"""pytest -p going_on --passed FILE: leaves out the tests that FILE names, and adds each that passes or is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest


class _Passed:
    """The tests that need not run again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = set(path.read_text().splitlines()) if path.exists() else set()
        self.failed: set[str] = set()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        done = [item for item in items if item.nodeid in self.before]
        items[:] = [item for item in items if item.nodeid not in self.before]
        config.hook.pytest_deselected(items=done)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self.failed:
            with self.path.open("a") as file:
                file.write(f"{report.nodeid}\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, required=True, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Passed(config.option.passed))

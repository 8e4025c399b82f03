"""Which models a program still uses: one is left over if others of its kind have taken its place.

A search for hyperparameters, folds or clients train one model after the other.  What holds the earlier ones, such as a
list of results or a reference cycle, holds their gradients, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_AFTER = 2  # optimizers' steps since a model was first called: others may still have their turn


class Uses:
    """When models were first called, and last with gradients, in optimizers' steps.  By id: see AutoMarks."""

    def __init__(self) -> None:
        self.n_steps = 0
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def begin(self, root: Any) -> None:
        """A model is called for the first time; another with its id is gone."""
        self.first[id(root)] = self.n_steps
        self.last.pop(id(root), None)

    def call(self, root: Any) -> None:
        """A model that has begun is called with gradients on."""
        self.last[id(root)] = self.n_steps

    def left_over(self, roots: Iterable[Any]) -> list[Any]:
        """Models that were trained, but not since one with the same modules was called first, which still trains."""
        trained = [root for root in roots if id(root) in self.last]
        begun = max((self.first[id(root)] for root in trained), default=0)
        if all(self.last[id(root)] >= begun for root in trained):
            return []  # as in most programs
        latest: dict[Any, int] = {}
        for root in trained:
            first = self.first[id(root)]
            if self.n_steps - first >= _AFTER:
                kind = _kind(root)
                latest[kind] = max(latest.get(kind, 0), first)
        return [root for root in trained if self.last[id(root)] < latest.get(_kind(root), 0)]


def _kind(root: Any) -> tuple[type[Any], ...]:
    """The classes of its modules: a Sequential alone says little, and sizes may differ from model to model."""
    return tuple(type(module) for module in root.modules())

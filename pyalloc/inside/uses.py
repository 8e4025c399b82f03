"""Which models a program still uses: one is left over if others of its kind have taken its place.

A search for hyperparameters, folds or clients train one model after the other.  What holds the earlier ones, such as a
list of results or a reference cycle, holds their gradients, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyalloc.inside import tensors

_Gradient = tuple[int, int]  # its id and its number of changes
_AFTER = 2  # optimizers' steps since a model was first called: others may still have their turn


class Uses:
    """When models were first called, and last with gradients, in optimizers' steps.  By id: see AutoMarks."""

    def __init__(self) -> None:
        self.n_steps = 0
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        # Models that have had some, when an optimizer stepped.
        self.with_gradients: set[int] = set()
        self.unstepped: dict[int, _Gradient] = {}  # by parameter: its gradient at the last step

    def begin(self, root: Any) -> None:
        """A model is called for the first time; another with its id is gone."""
        self.first[id(root)] = self.n_steps
        self.last.pop(id(root), None)
        self.with_gradients.discard(id(root))

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

    def unused(
        self, trainable: Iterable[tuple[Any, Any]], stepped: set[int]
    ) -> Iterator[tuple[Any, Any]]:
        """Models and gradients of their parameters that no optimizer steps, such as a teacher's or a frozen part's.

        Gradients that have not changed since the last step are leftovers, which zero_grad() would clear: left out.

        Args:
            trainable: models, and parameters of theirs that take gradients.
            stepped: parameters that an optimizer steps, by id.
        """
        before, self.unstepped = self.unstepped, {}
        for root, parameter in trainable:
            gradient = tensors.gradient(parameter)
            if gradient is None:
                continue
            self.with_gradients.add(id(root))
            if id(parameter) not in stepped:
                now = self.unstepped[id(parameter)] = id(gradient), tensors.n_changes(gradient)
                if before.get(id(parameter), now) != now:
                    yield root, gradient

    def untrained(self, roots: Iterable[Any]) -> list[Any]:
        """Those that were called with gradients on, and have had none so far."""
        known = self.last.keys() - self.with_gradients
        return [each for each in roots if id(each) in known]


def classes(models: Iterable[Any]) -> list[str]:
    """Their names, each once."""
    return list(dict.fromkeys(type(each).__name__ for each in models))


def _kind(root: Any) -> tuple[type[Any], ...]:
    """The classes of its modules: a Sequential alone says little, and sizes may differ from model to model."""
    return tuple(type(module) for module in root.modules())

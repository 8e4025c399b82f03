"""Which runs of forward passes belong together because a pass goes on from what another one returned.

Such are the steps of a recurrent net, or layers that are called one by one: no parts of a batch.  A run ends with the
backward pass, or the optimizer's step, after it.
"""

from __future__ import annotations

from pyalloc.common.config import ANY_CHAINED

_MOST = 16  # lengths that are told: where there are more, sequences differ in length


class Runs:
    """The run in progress, and the lengths of those with such a pass."""

    def __init__(self) -> None:
        self.n_passes = 0
        self.is_chained = False
        self.lengths: set[int] = set()

    def add(self, goes_on: bool) -> None:
        """A pass begins, with or without something that was computed from what has a gradient."""
        self.n_passes += 1
        self.is_chained |= goes_on

    def end(self) -> str:
        """Ends the run.  Returns the lengths, once there is another one; else ""."""
        length = self.n_passes if self.is_chained else 0
        self.n_passes, self.is_chained = 0, False
        if not length or length in self.lengths or len(self.lengths) > _MOST:
            return ""
        self.lengths.add(length)
        is_any = len(self.lengths) > _MOST
        return ANY_CHAINED if is_any else ",".join(map(str, sorted(self.lengths)))

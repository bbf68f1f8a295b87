"""When to try out what does not seem to pay. Torch-free.

    try 1, 2, .. until the verdict --fails--> again after (cost / SHARE) steps, then twice as many,
                                              ... up to (cost / LEAST_SHARE)
                                  --pays----> again at once: more is to be learned

``cost`` is what a try costs, in plain steps; so all tries together cost less than SHARE of the
time, those that fail for long less and less, and those that cost nothing are as good as always on.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.005
"""Of the time, that tries may cost when they begin to fail."""

LEAST_SHARE = 0.0005
"""... and in the end."""

LONGEST = 2048
"""Steps between two tries at most."""

OPEN_COST = 3.0
"""Plain steps that tries in a row may cost without a verdict: then it counts as one that failed."""

NODES = 2
"""Of a try, for each sequence."""


def tried(sequences: int) -> int:
    """Of so many sequences, how many take part in a try."""
    return max(1, sequences // 8)


@dataclass
class Probing:
    """The tries of one class of requests."""

    due: int = 0  # the step from which on the next one may be
    failed: int = 0  # in a row
    spent: float = 0.0  # plain steps, on tries in a row without a verdict

    def verdict(self, step: int, cost: float, promising: bool) -> None:
        """After a try at ``step``, that cost so many plain steps."""
        self.spent += max(0.0, cost)
        if promising and self.spent < OPEN_COST:
            self.due = step
            self.failed = 0
        else:
            gap = min(cost / SHARE * 2.0 ** min(self.failed, 32), cost / LEAST_SHARE, LONGEST)
            self.due = step + max(1, int(gap))
            self.failed += 1
            self.spent = 0.0

    def pays(self) -> None:
        """No need for tries: the class is given nodes anyhow."""
        self.failed = 0
        self.spent = 0.0

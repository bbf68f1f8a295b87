"""When to try out what does not seem to pay. Torch-free.

    try 1, 2, .. until the verdict --fails--> again after (cost / SHARE) steps, then ever more,
                                              ... up to (cost / LEAST_SHARE)
                                  --pays----> again at once: more is to be learned

``cost`` is what a try costs, in plain steps; so all tries together cost less than SHARE of the
time, those that fail for long less and less, and those that cost nothing are as good as always on.
A new text of a class that paid not long ago need not wait as long: it may be one that pays.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.005
"""Of the time, that tries may cost when they begin to fail."""

NEW_SHARE = 0.02
"""Of the time, that tries of new texts may cost ..."""

LATELY = 8
"""... as long as no more tries have failed since the class paid."""

GROWTH = 2.0**0.5
"""Of the wait, from one try that fails to the next."""

LEAST_SHARE = 0.0005
"""... and in the end."""

LONGEST = 2048
"""Steps between two tries at most."""

CREDIT = 1.5
"""Plain steps that the first tries of a class may lose, and those after a wait."""


GIFT = 1.0
"""Plain steps that the very first tries may lose before anything is made of them."""


@dataclass
class Probing:
    """The tries of one class of requests."""

    due: int = 0  # the step from which on the next one may be
    failed: int = 0  # since it paid last
    lost: float = 0.0  # plain steps, by the tries since the last wait, less what they brought
    promising: int = 0  # tries in a row that were
    paid: bool = False  # ever
    last: int = 0  # the step of the last verdict, and
    cost: float = 0.0  # what the try cost

    def size(self, sequences: int) -> int:
        """Of so many sequences, how many take part in the next try: more where it looks good."""
        return min(sequences, max(1, sequences // 8) << min(self.promising, 8))

    def verdict(
        self, step: int, cost: float, brought: float, *, promising: bool, unknown: bool
    ) -> None:
        """After a try before ``step``, that cost and ``brought`` so many plain steps; what is not
        to be done again counts as brought. ``unknown``: it takes more tries to tell."""
        self.lost += cost - brought
        self.last, self.cost = step, cost
        unknown = unknown or (not self.failed and self.lost < GIFT)
        if (promising or unknown) and self.lost < CREDIT:
            self.due = step
            self.promising += promising
            return
        gap = max(self.lost - CREDIT, cost) / SHARE * GROWTH ** min(self.failed, 64)
        self.due = step + max(1, int(min(gap, cost / LEAST_SHARE, LONGEST)))
        self.failed += 1
        self.lost = 0.0
        self.promising = 0

    def pays(self) -> None:
        """The class is given nodes: what seemed to fail is forgotten."""
        self.paid = True
        self.failed = self.promising = 0
        self.lost = 0.0

    def renewed(self) -> None:
        """There is a new text of the class."""
        if self.paid and self.failed <= LATELY:
            self.due = min(self.due, self.last + int(self.cost / NEW_SHARE) + 1)

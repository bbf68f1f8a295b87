"""``TokenTimer``: ends a choice whose next token does not come in time.

    start --> first token due --first_token_came--> next token due --+--> expire(reason)
                                                     ^               |
                                                     +-- one came ---+

A choice that makes progress may go on for as long as it takes; one that waits ends. A token costs
the timer nothing: when it fires, it asks for the time of the last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class TokenTimer:
    """The timer of one ``ChoiceStream``, which starts and cancels it.

    ``arrived`` and what ``last_token_at`` returns are times of time.perf_counter. ``is_behind``
    returns whether tokens wait for the client, whose own limits hold then. ``expire`` is called
    with the reason.
    """

    def __init__(
        self,
        arrived: float,
        first_s: float,
        next_s: float,
        last_token_at: Callable[[], float],
        is_behind: Callable[[], bool],
        expire: Callable[[str], None],
    ) -> None:
        self._arrived = arrived
        self._first_s = first_s
        self._next_s = next_s
        self._last_token_at = last_token_at
        self._is_behind = is_behind
        self._expire = expire
        self._has_begun = False
        self._handle: asyncio.TimerHandle | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the next token is due; below 0: it is late."""
        due = self._arrived + self._first_s
        if self._has_begun:
            due = self._last_token_at() + self._next_s
        return due - time.perf_counter()

    def start(self) -> None:
        """Wait for the first token."""
        self._arm(self.left_s)

    def first_token_came(self) -> None:
        """Wait for the next token from now on."""
        self.cancel()
        self._has_begun = True
        self._arm(self._next_s)

    def cancel(self) -> None:
        """Stop. May be called before the start, and again."""
        if self._handle is not None:
            self._handle.cancel()

    def _arm(self, seconds: float) -> None:
        self._handle = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        if not self._has_begun:
            self._expire(f"the first token was not generated within {self._first_s:g} s")
        elif self._is_behind():
            self._arm(self._next_s)
        elif self.left_s > 0:
            self._arm(self.left_s)
        else:
            self._expire(f"no further token was generated within {self._next_s:g} s")

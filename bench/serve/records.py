"""What became of one request. Times in seconds on the run's clock, which starts at 0."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

NEVER = -1.0


class Record(msgspec.Struct):
    """``error``: empty when the answer came whole, else what went wrong in a few words.

    ``times``: when tokens came, an entry for each read that brought some. ``counts``: how many,
    where the server says so for each chunk.
    """

    index: int
    due: float
    prompt: int  # tokens asked for
    asked: int  # output tokens at most
    held: bool = False  # it waited because too many were in flight
    sent: float = NEVER
    ended: float = NEVER
    status: int = 0  # 0: no answer
    error: str = "not sent"
    message: str = ""  # what the server said about it
    times: array[float] = msgspec.field(default_factory=lambda: array("d"))
    counts: array[int] = msgspec.field(default_factory=lambda: array("l"))
    prompt_counted: int | None = None  # by the server
    output_counted: int | None = None
    cached: int | None = None

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def first(self) -> float | None:
        return self.times[0] if self.times else None

    @property
    def output(self) -> int:
        """Tokens: what the server counted, else what its chunks held, else a token a chunk."""
        if self.output_counted is not None:
            return self.output_counted
        return sum(self.counts) if self.counts else len(self.times)

    @property
    def ttft(self) -> float | None:
        """From when it was due."""
        return None if self.first is None else self.first - self.due

    @property
    def ttft_from_sent(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """(last - first) / (output tokens - 1); None for an output of one token."""
        if self.output < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.output - 1)

    @property
    def gaps(self) -> Sequence[float]:
        """Between one arrival of tokens and the next. Tokens that come together are one arrival;
        no zero stands for them."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

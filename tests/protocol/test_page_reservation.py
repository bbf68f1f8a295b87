"""Pages are reserved late, and still so early that only the last chunk's KV is left to send."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.page_reservation import (
    MARGIN_S,
    is_pace_known,
    reservation_delay_s,
    reserves_at_start,
)

RESERVE_S = 0.03


class Prompt(NamedTuple):
    """A prompt that is computed in chunks, of which each takes longer than the one before."""

    chunks: int
    chunk_s: float
    growth: float  # of the seconds of a chunk from the first to the last
    chunk_bytes: float
    link_bytes_s: float

    def ends(self) -> list[float]:
        """Seconds from the start to the end of each chunk."""
        found, now = [], 0.0
        for i in range(self.chunks):
            now += self.chunk_s * (1 + self.growth * i / self.chunks)
            found.append(now)
        return found

    def asks_at(self) -> float:
        """Seconds from the start to when the pages are asked for, as a hand-over does."""
        if reserves_at_start(self.chunks * 100, 100):
            return 0.0
        ends = self.ends()
        asks = ends[-1]  # at the latest, on the first token
        for i, end in enumerate(ends[:-1]):
            if end >= asks:
                break
            asks = end + reservation_delay_s(
                tokens=self.chunks * 100,
                computed=(i + 1) * 100,
                elapsed_s=end,
                kv_bytes=self.chunks * self.chunk_bytes,
                link_bytes_s=self.link_bytes_s,
                reserve_s=RESERVE_S,
            )
        return min(asks, ends[-1])

    def tail_s(self, asks_s: float) -> float:
        """Seconds from the first token until all KV is here."""
        free = asks_s + RESERVE_S
        for end in self.ends():
            free = max(free, end) + self.chunk_bytes / self.link_bytes_s
        return free - self.ends()[-1]


PROMPTS = st.builds(
    Prompt,
    chunks=st.integers(1, 60),
    chunk_s=st.floats(0.005, 1.0),
    growth=st.floats(0, 3),
    chunk_bytes=st.floats(1e6, 1e9),
    link_bytes_s=st.floats(1e8, 5e10),
)


@given(prompt=PROMPTS)
def test_tail_is_hardly_longer_than_with_pages_from_the_start(prompt: Prompt) -> None:
    late, early = prompt.tail_s(prompt.asks_at()), prompt.tail_s(0.0)
    assert late <= early + RESERVE_S + 1e-9  # where the link is the limit, KV flows that much later


@given(prompt=PROMPTS)
def test_tail_is_one_chunk_where_the_link_is_faster_than_the_prefill(prompt: Prompt) -> None:
    last_s = prompt.chunk_bytes / prompt.link_bytes_s
    # Until the pages are there, KV collects: it has to fit the time of the other chunks, too.
    if prompt.chunks > 2 and prompt.chunks * last_s + RESERVE_S + MARGIN_S < prompt.chunk_s / 2:
        assert prompt.tail_s(prompt.asks_at()) <= last_s + MARGIN_S


def test_long_prompt_holds_no_pages_for_most_of_its_time() -> None:
    prompt = Prompt(chunks=32, chunk_s=0.5, growth=1.0, chunk_bytes=3e8, link_bytes_s=2e10)
    whole_s = prompt.ends()[-1]
    assert 0.75 * whole_s < prompt.asks_at() < whole_s


@pytest.mark.parametrize(("chunks", "at_start"), [(1, True), (2, True), (3, False)])
def test_short_prompt_reserves_at_the_start(chunks: int, at_start: bool) -> None:
    assert reserves_at_start(chunks * 512, 512) is at_start
    assert reserves_at_start(chunks * 512, 0)  # the chunk is not known


def test_progress_that_comes_together_with_the_start_tells_no_pace() -> None:
    assert not is_pace_known(-math.inf)  # before the start is known
    assert not is_pace_known(0.0002)
    assert is_pace_known(MARGIN_S)


def test_without_a_known_link_the_first_progress_decides() -> None:
    def delay(link_bytes_s: float | None, computed: int) -> float:
        return reservation_delay_s(
            tokens=10_000, computed=computed, elapsed_s=1.0, kv_bytes=1e6,
            link_bytes_s=link_bytes_s, reserve_s=0.0,
        )  # fmt: skip

    assert delay(None, 1000) == 0.0
    assert delay(0.0, 1000) == 0.0
    assert delay(1e9, 0) == 0.0
    assert delay(1e9, 10_001) == 0.0  # the peer is not trusted
    assert delay(1e9, 1000) > 7.0

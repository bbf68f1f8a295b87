from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from router.generation.stop_matcher import StopMatcher, StopString

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stops if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(1, 6), max_size=30))
def test_any_cut_gives_what_the_definition_says(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(tuple(stops))
    sent, at, hit = "", 0, False
    for size in [*cuts, *[1] * len(text)]:
        safe, hit = matcher.push(text[at : at + size])
        sent += safe
        at += size
        assert naive(text, stops)[0].startswith(sent), "sent what belongs to a stop string"
        if hit:
            break
    if not hit:
        sent += matcher.flush()
    assert (sent, hit) == naive(text, stops)


def test_only_what_may_become_a_stop_string_is_held() -> None:
    matcher = StopMatcher(("\n\n", "END"))
    assert matcher.push("one\n") == ("one", False)
    assert matcher.push("two E") == ("\ntwo ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("x") == ("ENx", False)
    assert matcher.flush() == ""


class SimpleMatcher:
    """Searches the whole text again for each piece: slow, and right by its looks."""

    def __init__(self, stops: tuple[str, ...], *, keep_stop: bool) -> None:
        self.stops, self.keep_stop, self.held = stops, keep_stop, ""

    def push(self, piece: str) -> tuple[str, bool]:
        text = self.held + piece
        hits = [(at + len(s), at) for s in self.stops if (at := text.find(s)) >= 0]
        if hits:
            end, begin = min(hits)
            return text[: end if self.keep_stop else begin], True
        keep = max(
            size
            for s in self.stops
            for size in range(min(len(text) + 1, len(s)))
            if text.endswith(s[:size])
        )
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False


@given(
    pieces=st.lists(st.text("abc", max_size=6), max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=4),
    keep_stop=st.booleans(),
)
def test_every_piece_gives_what_a_search_of_the_whole_text_gives(
    pieces: list[str], stops: list[str], keep_stop: bool
) -> None:
    matcher = StopMatcher(tuple(stops), keep_stop=keep_stop)
    simple = SimpleMatcher(tuple(stops), keep_stop=keep_stop)
    for piece in pieces:
        result = matcher.push(piece)
        assert result == simple.push(piece)
        if result[1]:
            return
    assert matcher.flush() == simple.held


def test_long_stop_strings_cost_no_more_than_short_ones() -> None:
    """With four of 4,096 characters and 4,000 characters held back, a search of the whole text
    takes some 2 ms a token."""
    matcher = StopMatcher(("a" * 4095 + "b", *(c * 4096 for c in "cde")))
    matcher.push("a" * 4000)
    start = time.thread_time()
    for _ in range(50):
        assert matcher.push("a") == ("", False)
    assert (time.thread_time() - start) / 50 < 200e-6


def test_a_text_takes_steps_in_proportion_to_its_length() -> None:
    """Strings that match themselves almost everywhere: borders are followed at most as often as
    characters were read."""

    class CountingText(str):
        reads = 0

        def __getitem__(self, place: object) -> str:
            CountingText.reads += 1
            return str.__getitem__(self, place)  # type: ignore[index]

    for text, piece in (("a" * 4095 + "b", "a" * 4094 + "c"), ("ab" * 2000 + "c", "ab" * 1999)):
        CountingText.reads = 0
        stop = StopString(CountingText(text))
        for character in piece * 3:
            assert not stop.push(character)
        assert CountingText.reads < 6 * 3 * len(piece)

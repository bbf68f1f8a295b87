from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.generation.output_text import StopMatcher

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

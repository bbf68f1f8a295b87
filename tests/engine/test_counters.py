"""What an engine counts of speculation, and what its beats make of it."""

from __future__ import annotations

import msgspec
import pytest

from engine.counters import Counters, SpecCounts, SpecFigures
from engine.reports import Pace
from engine.spec import MOST_DRAFTED


def test_drafts_are_counted_by_how_far_they_were_accepted() -> None:
    counts = SpecCounts()
    counts.step([4, 0, 2, 1], [3, 0, 0, 1], 0.25)
    counts.step([0, 0], [0, 0], 0.5)  # nobody had anything to propose: it took its time
    assert (counts.steps, counts.drafts) == (1, 3)
    assert (counts.draft_tokens, counts.accepted_tokens) == (7, 4)
    assert counts.accepted_beyond == [2, 1, 1, *[0] * (MOST_DRAFTED - 3)]
    assert counts.draft_seconds == 0.75


def test_lives_of_engines_add_up_over_the_socket() -> None:
    one, other = Counters(decode_rows=10), Counters(decode_rows=5)
    one.speculation.step([2], [2], 0.1)
    other.speculation.step([16], [16], 0.2)
    other.speculation.drops = 1
    sum_ = msgspec.msgpack.decode(msgspec.msgpack.encode(one.plus(other)), type=Counters)
    assert sum_.decode_rows == 15
    spec = sum_.speculation
    assert (spec.steps, spec.drafts, spec.draft_tokens, spec.accepted_tokens) == (2, 2, 18, 18)
    assert spec.accepted_beyond == [2, 2, *[1] * (MOST_DRAFTED - 2)]
    assert spec.draft_seconds == pytest.approx(0.3) and spec.drops == 1


def test_what_proposes_is_said_in_words() -> None:
    assert str(SpecFigures()) == "off"
    assert str(SpecFigures("ngram")) == "ngram"
    assert str(SpecFigures("", "no such folder")) == "dropped: no such folder"


def test_the_pace_is_that_of_the_last_beats() -> None:
    counters, pace = Counters(), Pace()
    assert pace.of(counters) == 1.0, "nothing decoded yet"
    counters.decode_rows, counters.speculation.accepted_tokens = 100, 150
    assert pace.of(counters) == pytest.approx(2.5)
    assert pace.of(counters) == pytest.approx(2.5), "an idle beat forgets nothing"
    for _ in range(60):
        counters.decode_rows += 100
        now = pace.of(counters)
    assert 1.0 <= now < 1.01

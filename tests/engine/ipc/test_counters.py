"""What an engine counts of speculation."""

from __future__ import annotations

import msgspec
import pytest

from engine.ipc.counters import EngineCounters, SpeculationCounters, SpeculationStatus
from engine.ipc.settings import MAX_DRAFT_TOKENS


def test_drafts_are_counted_by_accepted_length() -> None:
    counts = SpeculationCounters()
    counts.step([4, 0, 2, 1], [3, 0, 0, 1], 0.25)
    counts.step([0, 0], [0, 0], 0.5)  # nobody had anything to propose: it took its time
    assert (counts.steps, counts.drafts) == (1, 3)
    assert (counts.draft_tokens, counts.accepted_tokens) == (7, 4)
    assert counts.accepted_beyond == [2, 1, 1, *[0] * (MAX_DRAFT_TOKENS - 3)]
    assert counts.draft_seconds == 0.75


def test_counters_of_successive_engines_add_up_after_encoding() -> None:
    one, other = EngineCounters(decode_rows=10), EngineCounters(decode_rows=5)
    one.speculation.step([2], [2], 0.1)
    other.speculation.step([16], [16], 0.2)
    other.speculation.crashes, one.speculation.load_failures = 1, 2
    sum_ = msgspec.msgpack.decode(msgspec.msgpack.encode(one.plus(other)), type=EngineCounters)
    assert sum_.decode_rows == 15
    spec = sum_.speculation
    assert (spec.steps, spec.drafts, spec.draft_tokens, spec.accepted_tokens) == (2, 2, 18, 18)
    assert spec.accepted_beyond == [2, 2, *[1] * (MAX_DRAFT_TOKENS - 2)]
    assert spec.draft_seconds == pytest.approx(0.3)
    assert (spec.crashes, spec.load_failures) == (1, 2)


def test_speculation_status_as_text() -> None:
    assert str(SpeculationStatus()) == "off"
    assert str(SpeculationStatus("ngram")) == "ngram"
    assert str(SpeculationStatus("", "no such folder")) == "dropped: no such folder"

"""Which tokens of an output count as reasoning."""

from __future__ import annotations

import pytest

from router.generation.reasoning_count import (
    REASONING_IS_OFF,
    ReasoningCounter,
    ReasoningMarks,
)

BEGIN, END, CALL = 1, 2, 3
OPEN = ReasoningMarks(True, BEGIN, frozenset({END, CALL}), "</think>")
WAITING = OPEN._replace(is_open=False)
TEXTS = {BEGIN: "<think>", END: "</think>", CALL: "<tool_call>", 9: "\n"}


def counted(marks: ReasoningMarks, ids: list[int], together: int) -> int:
    counter = ReasoningCounter(marks)
    for at in range(0, len(ids), together):
        if counter.done:
            break
        part = ids[at : at + together]
        counter.count(part, "".join(TEXTS.get(token, "x") for token in part))
    return counter.tokens


@pytest.mark.parametrize("together", [1, 2, 100])
@pytest.mark.parametrize(
    ("marks", "ids", "count"),
    [
        (OPEN, [5, 6, END, 7], 2),
        (OPEN, [BEGIN, 5, END, 7], 1),
        (OPEN, [5, CALL, 7], 1),
        (OPEN, [5, 6], 2),
        (OPEN, [END, 7], 0),
        (WAITING, [BEGIN, 5, 6, END, 7], 2),
        (WAITING, [9, BEGIN, 5, END, 7], 1),
        (WAITING, [5, 6, 7], 0),
        (REASONING_IS_OFF, [5, END, 7], 0),
    ],
)
def test_tokens_between_the_markers_count(
    marks: ReasoningMarks, ids: list[int], count: int, together: int
) -> None:
    assert counted(marks, ids, together) == count


def test_a_marker_after_other_text_begins_nothing() -> None:
    assert counted(WAITING, [9, 5, BEGIN, 6, END], together=1) == 0


def test_spelled_markers_are_found_in_the_text() -> None:
    counter = ReasoningCounter(ReasoningMarks(True, None, frozenset(), "</think>"))
    for ids, text in (([5], "hm </th"), ([6, 7], "in"), ([8], "k>yes")):
        assert not counter.done
        counter.count(ids, text)
    assert (counter.tokens, counter.done) == (4, True)


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (["for", " i in", " x"], 0),
        (["\n<thi", "s> is text"], 0),
        (["\n<th", "ink>\nhm", " so", "</think>", "yes"], 4),
        (["<think>a</think>b", "c"], 1),
    ],
)
def test_a_spelled_marker_must_come_first(texts: list[str], count: int) -> None:
    counter = ReasoningCounter(ReasoningMarks(False, None, frozenset(), "</think>", "<think>"))
    for text in texts:
        if not counter.done:
            counter.count([5], text)
    assert (counter.tokens, counter.done) == (count, True)

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.openai.chat.output_parser import ParsedDelta, ReasoningDelta
from router.openai.responses.item_writer import ItemWriter
from router.openai.responses.output_items import EventCounter
from router.openai.responses.tools import ToolSet
from router.openai.tool_calls.tool_parser import CallArgumentsDelta, CallStart, ContentDelta
from tests.router.openai.responses.streams import check_events, read_events

TOOLS = ToolSet()
TOOLS.add_all([{"type": "custom", "name": "patch"}, {"type": "function", "name": "run"}], "tools")


def written(
    *batches: list[ParsedDelta], parallel: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events and the items of an output that is parsed in these batches."""
    events = EventCounter()
    writer = ItemWriter(TOOLS, events, parallel=parallel)
    data = events.event("created", {})
    data += b"".join([writer.write(batch) for batch in batches]) + writer.finish("completed")
    items = [msgspec.to_builtins(item) for item in writer.done]
    read = read_events((data + events.event("completed", {"response": {"output": items}})).decode())
    read[-1]["response"]["id"] = "resp_1"
    check_events(read)
    return read, items


def call(number: int, name: str, *texts: str) -> list[ParsedDelta]:
    pieces = [CallArgumentsDelta(number, text) for text in texts]
    return [CallStart(number, f"call_{number}", name), *pieces]


def test_an_output_with_all_kinds_of_items() -> None:
    _, items = written(
        [ReasoningDelta("hm"), ReasoningDelta(", so"), ContentDelta("I run it.")],
        call(0, "run", "{", "}"),
        call(1, "patch", '{"input":"a"}'),
    )
    assert [item["type"] for item in items] == [
        *("reasoning", "message", "function_call", "custom_tool_call")
    ]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hm, so"}]
    assert (items[2]["arguments"], items[3]["input"]) == ("{}", "a")
    assert (items[2]["call_id"], items[3]["call_id"]) == ("call_0", "call_1")


def test_white_space_between_items_is_no_message() -> None:
    _, items = written(
        [ReasoningDelta("hm"), ContentDelta("\n"), *call(0, "run", "{}"), ContentDelta("\n\n")],
        call(1, "run", "{}"),
    )
    assert [item["type"] for item in items] == ["reasoning", "function_call", "function_call"]
    _, items = written([ReasoningDelta("hm"), ContentDelta("\n\n"), ContentDelta("Hello")])
    assert items[1]["content"][0]["text"] == "\n\nHello"


def test_an_output_without_text_is_an_empty_message() -> None:
    _, [item] = written([])
    assert item["type"] == "message" and item["content"][0]["text"] == ""


def test_the_input_of_a_custom_tool_is_streamed() -> None:
    events, _ = written(call(0, "patch", '{"inp', 'ut":"a', "b\\", 'n"', "}"))
    deltas = [e["delta"] for e in events if e["type"].endswith("custom_tool_call_input.delta")]
    assert deltas == ["a", "b", "\n"]


def test_calls_after_the_first_are_dropped_where_they_are_not_parallel() -> None:
    _, items = written(call(0, "run", "{}"), call(1, "run", "{}"), parallel=False)
    assert [item["call_id"] for item in items] == ["call_0"]


def test_an_item_that_is_cut_is_incomplete() -> None:
    writer = ItemWriter(TOOLS, EventCounter(), parallel=True)
    writer.write([ContentDelta("a"), *call(0, "run", '{"a":')])
    writer.finish("incomplete")
    assert [item.status for item in writer.done] == ["completed", "incomplete"]


PIECES = st.lists(
    st.builds(ReasoningDelta, st.text(min_size=1, max_size=5))
    | st.builds(ContentDelta, st.text(alphabet=" \na", min_size=1, max_size=5))
    | st.builds(CallStart, st.just(-1), st.just("c"), st.sampled_from(["run", "patch", "other"]))
    | st.builds(CallArgumentsDelta, st.just(-1), st.text(max_size=5)),
    max_size=12,
)


@given(PIECES, st.booleans())
def test_events_of_any_output_agree_with_its_items(
    pieces: list[ParsedDelta], parallel: bool
) -> None:
    """The pieces of one batch and of many batches give the same items, apart from their ids."""
    numbered: list[ParsedDelta] = []
    calls = -1
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls += 1
            piece = piece._replace(call=calls, id=f"call_{calls}")
        elif isinstance(piece, CallArgumentsDelta):
            piece = piece._replace(call=max(calls, 0))
        numbered.append(piece)
    _, together = written(numbered, parallel=parallel)
    _, apart = written(*[[piece] for piece in numbered], parallel=parallel)
    assert [i | {"id": ""} for i in together] == [i | {"id": ""} for i in apart]

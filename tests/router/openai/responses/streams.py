"""Reads streams of ``/v1/responses`` and checks the rules that hold for all of them."""

from __future__ import annotations

import json
from typing import Any

LAST = {"response.completed", "response.incomplete", "response.failed"}


def events_of(text: str) -> list[dict[str, Any]]:
    """The events in the body of an answer, which keep all rules."""
    events = read_events(text)
    check_events(events)
    return events


def read_events(text: str) -> list[dict[str, Any]]:
    """The events in a text. Each has its type twice: for SSE and in the data."""
    events = []
    for block in text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def check_events(events: list[dict[str, Any]]) -> None:
    """Check order, numbers and indexes; deltas join to what ``done`` repeats."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in LAST
    assert not any(event["type"] in LAST for event in events[:-1])
    assert len({event["response"]["id"] for event in events if event.get("response")}) == 1
    assert not any(event.get("error") for event in events), "openai-python raises for these"
    done, deltas, open_item = list[Any](), "", None
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None and event["output_index"] == len(done)
            assert event["item"]["status"] == "in_progress"
            open_item, deltas = event["item"], ""
        elif kind == "output_item.done":
            assert open_item is not None and open_item["id"] == event["item"]["id"]
            assert text_of(event["item"]) in (deltas, None)
            done.append(event["item"])
            open_item = None
        elif "item_id" in event:
            assert open_item is not None
            assert (event["item_id"], event["output_index"]) == (open_item["id"], len(done))
            deltas += event.get("delta", "")
    if events[-1]["type"] != "response.failed":
        assert open_item is None
        assert [item["id"] for item in events[-1]["response"]["output"]] == [i["id"] for i in done]


def text_of(item: dict[str, Any]) -> str | None:
    """The text that deltas bring; None for an item that has none."""
    if item["type"] in ("message", "reasoning"):
        return "".join(part["text"] for part in item["content"])
    text: str | None = item.get("arguments" if item["type"] == "function_call" else "input")
    return text


def items_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The finished items, as Codex collects them."""
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]

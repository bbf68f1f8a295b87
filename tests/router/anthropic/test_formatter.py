"""The events of a message make up the whole message, however its text was cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from router.anthropic.formatter import PING, MessageFormatter, tool_input
from router.anthropic.wire import encode
from router.generation.choice_text import ChoiceDelta
from router.openai.answers.formatter import FinishedChoice, ResponseHeader
from router.openai.answers.wire_json import Usage
from router.openai.chat.output_plan import OutputPlan
from tests.router.anthropic.agent_templates import MODELS
from tests.router.anthropic.sessions import Client, Server, message_of

HEADER = ResponseHeader("msg_1", 0, "m", "fp")
CALL = '<tool_call>\n{"name": "Read", "arguments": {"path": "a<é🦊"}}\n</tool_call>'
TEXTS = [
    "",
    " \n",
    "plain é🦊 text",
    f"See:\n{CALL}",
    f"{CALL}\n{CALL}",
    f"{CALL} and then",
    "<think>\nHm.\n</think>\n\nSo.",
    f"<think>\nHm.\n</think>\n\n{CALL}",
    "<think>\nnever ends",
    "<tool_call>\nno call",
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = Server(MODELS["qwen3"], tmp_path_factory.mktemp("qwen3"))
    client = Client([], tools=True)
    client.user("hi")
    yield server.prompt(client.body())[2]
    server.close()


def shape(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The content without the random ids of calls."""
    return [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 120), max_size=6), st.booleans())
def test_a_stream_is_the_whole_message(
    plan: OutputPlan, text: str, cuts: list[int], plain: bool
) -> None:
    plan = OutputPlan() if plain else plan
    usage = Usage.of(9, 5, 4, 2)
    whole = MessageFormatter(HEADER, plan, 9, {}).response(
        [FinishedChoice(0, (1,), text, [1], [], "stop")], usage, UNSET
    )
    formatter, data = MessageFormatter(HEADER, plan, 9, {}), PING
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert formatter.opening() == b""
    data = b""
    for start, end in pairwise(places):
        data += formatter.events(ChoiceDelta(0, text[start:end], [1], [], None), UNSET)
    data += formatter.events(ChoiceDelta(0, "", [], [], "stop"), UNSET)
    streamed, told = message_of(data + formatter.closing(usage, UNSET)), json.loads(whole)
    assert shape(streamed) == shape(told)
    assert streamed["content"], "clients look at the first block"
    for name in ("stop_reason", "stop_sequence", "usage", "model", "role"):
        assert streamed[name] == told[name]


def test_plain_text_costs_one_event_for_each_delta() -> None:
    formatter = MessageFormatter(HEADER, OutputPlan(), 9, {})
    formatter.events(ChoiceDelta(0, "a", [1], [], None), UNSET)
    assert formatter.events(ChoiceDelta(0, 'b"', [1], [], None), UNSET) == (
        b"event: content_block_delta\n"
        b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"b'
        b'\\""}}\n\n'
    )
    assert formatter.events(ChoiceDelta(0, "", [1], [], None), UNSET) == b""


@given(st.text(max_size=30))
def test_any_arguments_become_an_object(text: str) -> None:
    assert isinstance(json.loads(encode(tool_input(text))), dict)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": 1.50}', {"a": 1.5}),
        ('{"a": "x', {"a": "x"}),
        ('{"a": "x", "b', {"a": "x"}),
        ("", {}),
        ("[1]", {}),
        ("[" * 5000, {}),
        ('{"a": ' * 5000, {}),
    ],
)
def test_arguments_that_were_cut_off(arguments: str, given: Any) -> None:
    assert json.loads(encode(tool_input(arguments))) == given

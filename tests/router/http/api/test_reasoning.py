"""Chats with models that think, over fake workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from protocol.registry.directory import ModelInfo
from tests.router.conftest import MODEL, Cluster, Start
from tests.router.fake_worker import speaks

EOS = 0
TEMPLATE = """\
{% if tools %}<tool_call> {{ tools | map(attribute="function.name") | join(",") }}
{% endif %}
{% for message in messages %}
{{ message.role }}: {% if message.reasoning_content %}<think>{{ message.reasoning_content }}\
</think>{% endif %}{{ message.content or "" }}{{ eos_token }}
{% endfor %}
{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}
{% if add_generation_prompt %}assistant: \
{% if enable_thinking is defined %}<think>
{% if not enable_thinking %}

</think>{% endif %}{% endif %}{% endif %}"""
OPEN = {"enable_thinking": True}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@pytest.fixture(scope="session")
def tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of the other tests, with the markers of a model that thinks."""
    own = Tokenizer.from_str(tokenizer.to_str())
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    own.add_tokens([AddedToken(mark, special=False) for mark in marks])
    return own


@pytest.fixture(scope="session")
def model_path(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model_info(tokenizer: Tokenizer) -> ModelInfo:
    return ModelInfo(
        id=MODEL,
        fingerprint="f" * 32,
        precision="exact",
        max_model_len=4096,
        vocab_size=tokenizer.get_vocab_size(),
        kv_bytes_per_token=1024,
    )


def says(tokenizer: Tokenizer, text: str, *, stop: bool = True, together: int = 1) -> Any:
    return speaks([*tokenizer.encode(text).ids, *[EOS] * stop], stop=stop, together=together)


async def chat(cluster: Cluster, **body: Any) -> tuple[dict[str, Any], str | None, Any]:
    """The message, the finish reason and the usage; the stream has to join to the same message."""
    response = await cluster.chat(**body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    message, usage = choice["message"], response.json()["usage"]
    streamed, finish, last = await stream(cluster, **body)
    assert streamed == {name: value for name, value in message.items() if value}
    assert (finish, last) == (choice["finish_reason"], usage)
    return message, finish, usage


async def stream(cluster: Cluster, **body: Any) -> tuple[dict[str, Any], str | None, Any]:
    options = {"include_usage": True}
    response = await cluster.chat(**body, stream=True, stream_options=options)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    joined: dict[str, Any] = {}
    finish = None
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        finish = choice["finish_reason"] or finish
        for name, value in choice["delta"].items():
            if isinstance(value, str):
                joined[name] = joined.get(name, "") + value
    return {n: v for n, v in joined.items() if v}, finish, chunks[-1]["usage"]


def prompt_of(cluster: Cluster, tokenizer: Tokenizer) -> str:
    request = cluster.workers[-1].requests[-1].request
    text: str = tokenizer.decode(list(request.prompt), skip_special_tokens=False)
    return text


def grammar_of(cluster: Cluster) -> str:
    grammar: str = cluster.workers[-1].requests[-1].request.sampling.grammar
    return grammar


def fits(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=EOS), grammar, log_level=0)
    ids = tokenizer.encode(text).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("together", [1, 3, 100])
async def test_reasoning_is_a_field_of_its_own(
    start: Start, tokenizer: Tokenizer, together: int
) -> None:
    text = "<think>\nlet 🦊 me\n</think>\n\nhello 🦊"
    cluster = await start(says(tokenizer, text, together=together))
    message, finish, usage = await chat(cluster)
    assert message == {
        "role": "assistant",
        "content": "hello 🦊",
        "refusal": None,
        "reasoning": "let 🦊 me",
        "reasoning_content": "let 🦊 me",
    }
    count = len(tokenizer.encode("\nlet 🦊 me\n").ids)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    assert finish == "stop"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_the_name_of_the_field_can_be_chosen(
    start: Start, tokenizer: Tokenizer, field: str
) -> None:
    cluster = await start(says(tokenizer, "<think>so</think>yes"), reasoning_field=field)
    message, _, _ = await chat(cluster)
    assert {name for name in message if "reasoning" in name} == {field}


async def test_an_answer_that_is_cut_within_the_reasoning(
    start: Start, tokenizer: Tokenizer
) -> None:
    cluster = await start(says(tokenizer, "so it </th", stop=False))
    message, finish, usage = await chat(cluster, chat_template_kwargs=OPEN)
    assert (message["content"], message["reasoning"]) == (None, "so it </th")
    assert finish == "length"
    details = usage["completion_tokens_details"]
    assert details["reasoning_tokens"] == usage["completion_tokens"]


@pytest.mark.parametrize("long", ["", "x" * 70_000])
async def test_the_prompt_tells_where_the_output_begins(
    start: Start, tokenizer: Tokenizer, model_info: ModelInfo, long: str
) -> None:
    """The long chat is rendered in a child process."""
    cluster = await start()
    text = "so</think>yes"
    await cluster.add(says(tokenizer, text), max_model_len=1 << 17)
    await cluster.attached(1)
    said = f"What does <think> mean?{long}"
    for options, content, reasoning in (
        (OPEN, "yes", "so"),
        ({"enable_thinking": False}, text, None),
        ({}, text, None),
    ):
        response = await cluster.chat(said, chat_template_kwargs=options)
        message = response.json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning")) == (content, reasoning)
        details = response.json()["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": len(tokenizer.encode("so").ids) if reasoning else 0}


async def test_a_parser_can_be_configured(start: Start, tokenizer: Tokenizer) -> None:
    text = "so</think>yes"
    for name, content in (("deepseek_r1", "yes"), ("none", text), ("mistral", text)):
        cluster = await start(says(tokenizer, text), reasoning_parser=name)
        message, _, usage = await chat(cluster)
        assert message["content"] == content
        assert ("completion_tokens_details" in usage) == (name != "none")


async def test_a_continued_answer_has_no_reasoning(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(says(tokenizer, " is blue"), reasoning_parser="deepseek_r1")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The sky"}]
    response = await cluster.chat(
        messages=messages, add_generation_prompt=False, continue_final_message=True
    )
    assert response.json()["choices"][0]["message"]["content"] == " is blue"


async def test_hidden_reasoning_is_neither_shown_nor_constrained(
    start: Start, tokenizer: Tokenizer
) -> None:
    cluster = await start(says(tokenizer, '<think>so</think>{"a":1}'))
    message, _, usage = await chat(cluster, include_reasoning=False, response_format=FORMAT)
    assert message == {"role": "assistant", "content": '{"a":1}', "refusal": None}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert fits(tokenizer, grammar_of(cluster), '<think>so</think>{"a":1}')
    cluster.workers[0].script = says(tokenizer, "<think>so", stop=False)
    message, finish, _ = await chat(cluster, include_reasoning=False)
    assert (message["content"], finish) == (None, "length")


async def test_grammars_wait_for_the_end_of_the_reasoning(
    start: Start, tokenizer: Tokenizer
) -> None:
    cluster = await start(says(tokenizer, 'so</think>{"a":1}'))
    await cluster.chat(response_format=FORMAT, chat_template_kwargs=OPEN)
    assert fits(tokenizer, grammar_of(cluster), 'so\n</think>\n\n{"a":1}')
    assert not fits(tokenizer, grammar_of(cluster), '{"a":1}')
    await cluster.chat(response_format=FORMAT, chat_template_kwargs={"enable_thinking": False})
    assert fits(tokenizer, grammar_of(cluster), '{"a":1}')
    assert not fits(tokenizer, grammar_of(cluster), 'so</think>{"a":1}')
    await cluster.chat(response_format=FORMAT)
    for text in ('{"a":1}', '<think>so</think>{"a":1}'):
        assert fits(tokenizer, grammar_of(cluster), text)
    await cluster.chat(chat_template_kwargs=OPEN)
    assert not grammar_of(cluster), "free text costs no grammar"


async def test_a_forced_call_waits_for_the_end_of_the_reasoning(
    start: Start, tokenizer: Tokenizer
) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    cluster = await start(says(tokenizer, f"I add\n</think>\n\n{call}"))
    body: dict[str, Any] = {"tools": [TOOL], "chat_template_kwargs": OPEN}
    for choice in ("required", "auto"):
        response = await cluster.chat(**body, tool_choice=choice)
        [got] = response.json()["choices"]
        assert got["finish_reason"] == "tool_calls"
        assert got["message"]["reasoning"] == "I add"
        assert got["message"]["content"] is None
        assert json.loads(got["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
        assert fits(tokenizer, grammar_of(cluster), f"I add</think>\n{call}")
    cluster.workers[0].script = says(tokenizer, f"I add {call}")
    response = await cluster.chat(**body)
    message = response.json()["choices"][0]["message"]
    assert message["reasoning"] == "I add "
    assert message["tool_calls"][0]["function"]["name"] == "add"


async def test_a_budget_is_a_grammar(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(says(tokenizer, "so</think>yes"))
    for budget in (0, 3):
        await cluster.chat(thinking_token_budget=budget, chat_template_kwargs=OPEN)
        grammar = grammar_of(cluster)
        assert fits(tokenizer, grammar, "q" * budget + "</think>yes")
        assert not fits(tokenizer, grammar, "q" * (budget + 1) + "</think>yes")
    for unlimited in (-1, None, 50):
        body: dict[str, Any] = {"thinking_token_budget": unlimited, "max_tokens": 50}
        await cluster.chat(**body, chat_template_kwargs=OPEN)
        assert not grammar_of(cluster)


@pytest.mark.parametrize("value", [True, 1.5, 2.0, "3", -2])
async def test_a_wrong_budget_is_refused(start: Start, value: Any) -> None:
    cluster = await start()
    response = await cluster.chat(thinking_token_budget=value)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking_token_budget"


async def test_an_effort_reaches_the_template(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(says(tokenizer, "yes"))
    for effort, kwargs, end in (
        ("high", {}, "[high]assistant: <think>\n"),
        ("none", {}, "[none]assistant: <think>\n\n</think>"),
        ("low", {"enable_thinking": False}, "[low]assistant: <think>\n\n</think>"),
    ):
        await cluster.chat(reasoning_effort=effort, chat_template_kwargs=kwargs)
        assert prompt_of(cluster, tokenizer).endswith(end)
    response = await cluster.chat(reasoning_effort="huge")
    assert response.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_comes_back_in_messages(
    start: Start, tokenizer: Tokenizer, field: str
) -> None:
    """Old markers in the prompt do not change where the output begins."""
    cluster = await start(says(tokenizer, "yes</think>"))
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", field: "so"},
        {"role": "user", "content": "and <think>"},
    ]
    response = await cluster.chat(messages=messages)
    assert "assistant: <think>so</think>ho<|eos|>" in prompt_of(cluster, tokenizer)
    message = response.json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning")) == ("yes</think>", None)

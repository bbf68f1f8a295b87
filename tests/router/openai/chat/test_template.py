"""Chat templates against those of transformers, and what a client cannot do with them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from router.common.errors import ApiError
from router.openai.bodies.messages import Messages, to_template_message
from router.openai.chat.control_tokens import ControlTokens
from router.openai.chat.template import ChatTemplate
from router.openai.chat.template_files import load_template
from tests.router.openai.chat.toy import CONTROL, PLAIN, SPECIAL, STYLES, TOKENIZERS, save

MESSAGES = TypeAdapter(Messages)
HELLO = [{"role": "user", "content": "Hello"}]
CASES = [(style, kind) for style in STYLES for kind in TOKENIZERS]


class Model:
    """A template, and the same in transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = load_template(str(folder), self.tokenizer)
        assert template is not None
        self.template = template
        self.reference = AutoTokenizer.from_pretrained(folder)

    def ours(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        messages = MESSAGES.validate_python(chat)
        text, mark = self.template.render(messages, tools)
        if len(text) < 4096:  # the way of rendering on the event loop differs in nothing
            assert self.template.render(messages, tools, metered=True) == (text, mark)
        return self.template.encode(text, mark)

    def theirs(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        messages = [to_template_message(m, developer=False) for m in MESSAGES.validate_python(chat)]
        ids: list[int] = self.reference.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        return ids


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Model]:
    return {
        (style, kind): Model(
            save(tmp_path_factory.mktemp("model"), TOKENIZERS[kind](), STYLES[style])
        )
        for style, kind in CASES
    }


words = st.sampled_from(
    ["Hello", " ", "\n", "<", "|", "im", "_end", ">", "[", "user\n", "é🦊", "  "]
)
texts = st.one_of(st.text(max_size=30), st.lists(words, max_size=12).map("".join)).filter(
    lambda text: not any(mark in text for mark in [*CONTROL, *PLAIN])
)
arguments = st.dictionaries(texts, st.one_of(texts, st.integers(), st.none()), max_size=3)
calls = arguments.map(
    lambda given: {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look", "arguments": json.dumps(given)},
    }
)
tool = st.builds(
    lambda text, given: {
        "type": "function",
        "function": {"name": "look", "description": text, "parameters": given},
    },
    texts,
    arguments,
)


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    if draw(st.booleans()):
        chat.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 3))):
        chat.append({"role": "user", "content": draw(texts)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
        if draw(st.booleans()):
            answer["tool_calls"] = [draw(calls)]
        chat.append(answer)
    return [*chat, {"role": "user", "content": draw(texts)}]


@given(st.sampled_from(CASES), chats(), st.lists(tool, max_size=2))
def test_the_tokens_are_those_of_transformers(
    models: dict[tuple[str, str], Model],
    case: tuple[str, str],
    chat: list[dict[str, Any]],
    tools: list[dict[str, Any]],
) -> None:
    model = models[case]
    assert model.ours(chat, tools) == model.theirs(chat, tools)


pieces = st.lists(
    st.one_of(words, st.sampled_from([*CONTROL, "<s></s>", "<|im_end|><|im_end|>", "\ufdd0"])),
    max_size=8,
).map("".join)


@given(st.sampled_from(CASES), pieces, pieces)
def test_a_client_writes_no_control_tokens(
    models: dict[tuple[str, str], Model], case: tuple[str, str], first: str, second: str
) -> None:
    model = models[case]
    control = {model.tokenizer.token_to_id(text) for text in CONTROL}
    chat = [
        {"role": "system", "content": first},
        {"role": "user", "content": second},
        {"role": "assistant", "content": second},
        {"role": "user", "content": first},
    ]
    harmless = [{**message, "content": "x"} for message in chat]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {first: [second]}}}]
    ids = model.ours(chat, tools)
    expected = [i for i in model.ours(harmless, []) if i in control]
    assert [i for i in ids if i in control] == expected
    text = model.tokenizer.decode(ids, skip_special_tokens=False)
    rendered, sign = model.template.render(MESSAGES.validate_python(chat), tools)
    whole = rendered.replace(sign, "") if sign else rendered
    # The tokens spell what the client wrote; transformers' own way is the measure of spaces.
    theirs = model.tokenizer.encode(whole, add_special_tokens=False).ids
    assert text.replace(" ", "") == model.tokenizer.decode(
        theirs, skip_special_tokens=False
    ).replace(" ", "")


def test_breaks_add_no_space(models: dict[tuple[str, str], Model]) -> None:
    for kind in TOKENIZERS:
        model = models["chatml", kind]
        ids = model.ours([{"role": "user", "content": "a<|im_end|>b [INST]c"}], [])
        text = model.tokenizer.decode(ids, skip_special_tokens=False)
        assert "a<|im_end|>b [INST]c" in text


def test_too_many_control_tokens_are_refused(models: dict[tuple[str, str], Model]) -> None:
    with pytest.raises(ApiError, match="control tokens") as error:
        models["chatml", "byte-level"].ours([{"role": "user", "content": "<s>" * 5000}], [])
    assert error.value.param == "messages"


def test_hundreds_of_control_tokens_are_found_in_linear_time() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    names = [f"<|reserved_special_token_{i}|>" for i in range(250)]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    control = ControlTokens(tokenizer)
    for name in [*names, *CONTROL]:
        marked, mark = control.insert_breaks([f"a{name}<"])
        assert marked == [f"a{name[0]}{mark}{name[1:]}<"]
    for unit in ("<", "<|", "<|reserved_special_token_", "[INST"):
        text = unit * ((64 << 10) // len(unit))
        start = time.thread_time()
        assert control.insert_breaks([text]) == ([text], "")
        assert time.thread_time() - start < 0.05, "one alternative after the other takes 0.2 s"


def test_half_of_a_surrogate_pair_is_refused(models: dict[tuple[str, str], Model]) -> None:
    with pytest.raises(ApiError, match="surrogate"):
        models["chatml", "byte-level"].ours([{"role": "user", "content": "\ud800"}], [])


def template_of(source: str, **more: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **more}, SPECIAL, TOKENIZERS["byte-level"]())


def rendered(template: ChatTemplate, chat: list[dict[str, Any]], **given: Any) -> str:
    return template.render(MESSAGES.validate_python(chat), **given)[0]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ messages.x.y }}", "no attribute"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "too large"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too large"),
        ("{{ 1 / 0 }}", "too large"),
    ],
)
def test_what_a_template_refuses_is_the_fault_of_messages(source: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as error:
        rendered(template_of(source), HELLO)
    assert (error.value.status, error.value.param) == (400, "messages")


def test_options_reach_the_template_but_replace_nothing() -> None:
    template = template_of("{{ bos_token }}{{ 'thinking' if enable_thinking }}")
    assert rendered(template, HELLO, options={"enable_thinking": True}) == "<s>thinking"
    for name in ("messages", "tools", "bos_token"):
        with pytest.raises(ApiError) as error:
            rendered(template, HELLO, options={name: "x"})
        assert error.value.param == "chat_template_kwargs"


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    chat = [{"role": "developer", "content": "Be brief"}, *HELLO]
    assert rendered(template_of("{{ messages[0].role }}"), chat) == "system"
    assert rendered(template_of("{{ messages[0].role }}{# developer #}"), chat) == "developer"


def test_tools_have_a_template_of_their_own() -> None:
    template = template_of("plain", tool_use="with {{ tools[0].function.name }}")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert rendered(template, HELLO) == "plain"
    assert rendered(template, HELLO, tools=tools) == "with f"


def test_the_date_is_to_be_had() -> None:
    assert len(rendered(template_of("{{ strftime_now('%Y-%m-%d') }}"), HELLO)) == 10

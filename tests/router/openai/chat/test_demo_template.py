"""Chats with the demo model, as it comes."""

from __future__ import annotations

import json

from pydantic import TypeAdapter

from cluster.models.locate import demo_path
from engine.demo.training.export import CHAT_TEMPLATE
from router.openai.bodies.messages import Messages
from router.openai.bodies.tools import Tools
from router.openai.chat.template_files import load_template
from router.openai.tool_calls.families.hermes import HERMES
from router.openai.tool_calls.families.syntaxes import detect_syntax
from router.text.vocabulary import load_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief.\nBe kind."},
    {"role": "user", "content": "<|eos|>"},
    {"role": "assistant", "content": "import os"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "2", "tool_call_id": "c"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "doubles"}}
PROMPT = """\
<|bos|># Tools, called as <tool_call>{"name": ..., "arguments": ...}</tool_call>:
# {"type": "function", "function": {"name": "f", "description": "doubles"}}
# system: Be brief.
# Be kind.
# user: <|eos|>

import os

<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
# tool: 2

"""


def test_a_chat_is_a_python_file() -> None:
    folder = str(demo_path())
    tokenizer = load_tokenizer(folder)
    template = load_template(folder, tokenizer)
    assert template is not None
    messages = TypeAdapter(Messages).validate_python(CHAT)
    [tool] = TypeAdapter(Tools).validate_python([TOOL])
    text, sign = template.render(messages, [tool.for_template()])
    assert text.replace(sign, "") == PROMPT
    ids = template.encode(text, sign)
    assert tokenizer.decode(ids, skip_special_tokens=False) == PROMPT
    special = [tokenizer.token_to_id(t) for t in ("<|bos|>", "<|eos|>")]
    assert [i for i in ids if i in special] == special[:1]
    assert detect_syntax(template.source) == HERMES


def test_the_template_on_disk_is_the_one_that_is_exported() -> None:
    config = json.loads((demo_path() / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE

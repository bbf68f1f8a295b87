"""Where chat templates are found, and which stop a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from protocol.errors import StartupError
from router.openai.bodies.messages import Messages
from router.openai.chat.template import ChatTemplate
from router.openai.chat.template_files import load_template
from tests.router.openai.chat.toy import TOKENIZERS


def rendered(template: ChatTemplate) -> str:
    hello = [{"role": "user", "content": "Hello"}]
    return template.render(TypeAdapter(Messages).validate_python(hello))[0]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one"),
        ({"tokenizer_config.json": {"chat_template": [
            {"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}}, "a"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "c"}]}}, "c"),
        ({"chat_template.json": {"chat_template": "json"},
          "tokenizer_config.json": {"chat_template": "one"}}, "json"),
        ({"chat_template.jinja": "{{ bos_token }}j",
          "tokenizer_config.json": {"bos_token": {"content": "<b>"}, "chat_template": "x"}},
         "<b>j"),
        ({"chat_template.jinja": "{{ eos_token }}",
          "special_tokens_map.json": {"eos_token": "<e>"}}, "<e>"),
    ],
)  # fmt: skip
def test_templates_are_found_where_hugging_face_has_them(
    tmp_path: Path, files: dict[str, Any], text: str | None
) -> None:
    for name, content in files.items():
        written = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(written)
    template = load_template(str(tmp_path), TOKENIZERS["byte-level"]())
    assert (template and rendered(template)) == text


@pytest.mark.parametrize(
    "config",
    ['{"chat_template": "{% if %}"}', '{"chat_template": 3}', "{", '{"chat_template": [3]}'],
)
def test_a_broken_template_stops_the_start(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(StartupError):
        load_template(str(tmp_path), TOKENIZERS["byte-level"]())

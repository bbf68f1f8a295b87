"""What a chat template shows of an earlier call is what the parser of its family makes it of.

So a model that repeats what it sees calls the same function, and the prompt of the next turn begins
with the tokens of this one. The templates are written for this test after those of the families.
"""

# ruff: noqa: RUF001 - DeepSeek's marks
from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from router.openai.bodies.messages import Messages
from router.openai.chat.template import ChatTemplate
from router.openai.tool_calls.families.syntaxes import detect_syntax
from tests.router.openai.chat.toy import byte_level
from tests.router.openai.tool_calls.writing import run

JSON_CALL = """{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments | tojson }}}"""
CALLS = "{% for c in messages[-1].tool_calls %}"
HERMES = CALLS + (
    "<tool_call>\n" + JSON_CALL.replace("KEY", "arguments") + "\n</tool_call>"
    "{{ '' if loop.last else '\\n' }}{% endfor %}"
)
LLAMA = (
    CALLS + JSON_CALL.replace("KEY", "parameters") + "{{ '' if loop.last else '; ' }}{% endfor %}"
)
MISTRAL = (
    "[TOOL_CALLS]["
    + CALLS
    + JSON_CALL.replace("KEY", "arguments")
    + "{{ '' if loop.last else ', ' }}{% endfor %}]"
)
MISTRAL_V13 = CALLS + (
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
)
MISTRAL_V11 = CALLS + (
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>"
    + CALLS
    + "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c['function']['name'] + '\\n```json\\n'"
    " + c['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}"
    "{{ '' if loop.last else '\\n' }}{% endfor %}<｜tool▁calls▁end｜>"
)
DEEPSEEK_31 = (
    "<｜tool▁calls▁begin｜>"
    + CALLS
    + "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}"
    "{{ '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>"
)
QWEN_XML = CALLS + (
    "<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else WRITTEN }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{{ '' if loop.last else '\\n' }}{% endfor %}"
)
PYTHON_VALUES = "(v | tojson if v is mapping or v is sequence else v | string)"
GEMMA = (
    """{% macro show(v) %}{% if v is string %}<|"|>{{ v }}<|"|>"""
    "{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{% raw %}{{% endraw %}{% for k, x in v | dictsort %}"
    "{{ '' if loop.first else ',' }}{{ k }}:{{ show(x) }}{% endfor %}}"
    "{% elif v is sequence %}[{% for x in v %}{{ '' if loop.first else ',' }}{{ show(x) }}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    + CALLS
    + "<|tool_call>call:{{ c.function.name }}{{ show(c.function.arguments) }}<tool_call|>"
    + "{% endfor %}"
)
PYTHONIC = (
    "[" + CALLS + "{% set call = c %}{{ call.function.name + '(' }}"
    "{% for k, v in c.function.arguments | items %}"
    "{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %})"
    "{{ '' if loop.last else ', ' }}{% endfor %}]"
)
TEMPLATES = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_V13,
    "mistral_args ": MISTRAL_V11,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK_31,
    "qwen3_coder": QWEN_XML.replace("WRITTEN", PYTHON_VALUES),
    "qwen3_coder ": QWEN_XML.replace("WRITTEN", "v | tojson"),
    "gemma4": GEMMA,
}
SCHEMA: dict[str, Any] = {
    "properties": {
        "at": {"$ref": "#/$defs/Place"},
        "code": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "lines": {"type": "array", "items": {"type": "string"}},
        "none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "ratio": {"type": "number"},
    },
    "$defs": {"Place": {"properties": {"name": {"type": "string"}, "x": {"type": "number"}}}},
}
ARGUMENTS = {
    "at": {"name": "Bonn", "x": -1.5},
    "code": 'def f():\n    return "<a href={x}>"\n\n',
    "days": 3,
    "exact": True,
    "lines": ["3", "true", "a, b"],
    "none": None,
    "ratio": 0.25,
}
CASES: list[dict[str, Any]] = [ARGUMENTS, {}, {"code": "", "exact": False, "lines": []}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_earlier_call_is_parsed_as_the_same_call(name: str) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, {}, byte_level())
    syntax = detect_syntax(template.source)
    assert syntax.name == name.strip()
    wanted = [("f", arguments) for arguments in CASES]
    calls = [
        {"id": f"abcDEF12{i}", "function": {"name": called, "arguments": json.dumps(arguments)}}
        for i, (called, arguments) in enumerate(wanted)
    ]
    messages = TypeAdapter(Messages).validate_python([{"role": "assistant", "tool_calls": calls}])
    text, mark = template.render(messages)
    text = text.replace(mark, "") if mark else text
    for pieces in ([text], list(text)):
        content, found = run(syntax.new_parser({"f": SCHEMA}), pieces)
        assert content == ""
        assert [(called, json.loads(given)) for called, given in found] == wanted

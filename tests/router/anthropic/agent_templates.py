"""Chat templates in the styles of real models, and how such a model writes its turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from engine.demo.training.export import CHAT_TEMPLATE as DEMO

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

_HEAD = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
    {{- 'Call them as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_RESULT = """\
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
"""
_CALL = """\
'<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments \
| tojson + '}\\n</tool_call>'"""

CHATML_TOOLS = f"""\
{_HEAD}
{{%- for message in messages %}}
    {{%- if message.role == 'tool' %}}
{_RESULT}
    {{%- elif message.role == 'assistant' %}}
        {{{{- '<|im_start|>assistant' }}}}
        {{%- if message.content %}}{{{{- '\\n' + message.content }}}}{{% endif %}}
        {{%- for call in message.tool_calls or [] %}}{{{{- '\\n' + {_CALL} }}}}{{% endfor %}}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif not loop.first or message.role != 'system' %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{% endif %}}
"""
"""As Qwen 2.5 and the Qwen 3 models that do not reason."""

QWEN3 = f"""\
{_HEAD}
{{%- set ns = namespace(last_query=0) %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}{{% set ns.last_query = loop.index0 %}}{{% endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
    {{%- if message.role == 'tool' %}}
{_RESULT}
    {{%- elif message.role == 'assistant' %}}
        {{{{- '<|im_start|>assistant\\n' }}}}
        {{%- if loop.index0 > ns.last_query and message.reasoning_content %}}
            {{{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}}}
        {{%- endif %}}
        {{{{- message.content }}}}
        {{%- for call in message.tool_calls or [] %}}
            {{%- if message.content or not loop.first %}}{{{{- '\\n' }}}}{{% endif %}}
            {{{{- {_CALL} }}}}
        {{%- endfor %}}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif not loop.first or message.role != 'system' %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
    {{%- if enable_thinking is defined and enable_thinking is false %}}
        {{{{- '<think>\\n\\n</think>\\n\\n' }}}}
    {{%- endif %}}
{{%- endif %}}
"""
"""As Qwen 3: reasoning before the last user message is not rendered again."""

Call = tuple[str, dict[str, Any]]


class Written(NamedTuple):
    """One turn of a model."""

    reasoning: str
    content: str
    calls: Sequence[Call]


def _write_calls(calls: Sequence[Call], between: str = "\n") -> str:
    return between.join(
        f'<tool_call>\n{{"name": "{name}", "arguments": '
        f"{json.dumps(given, ensure_ascii=False)}}}\n</tool_call>"
        for name, given in calls
    )


def _chatml(turn: Written) -> str:
    thought = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
    parts = [part for part in (turn.content, _write_calls(turn.calls)) if part]
    return f"{thought}{chr(10).join(parts)}<|im_end|>"


def _demo(turn: Written) -> str:
    return "\n\n".join(part for part in (turn.content, _write_calls(turn.calls)) if part)


class AgentModel(NamedTuple):
    """``write``: the text of a turn as the model writes it, with its last token."""

    template: str
    write: Callable[[Written], str]
    calls: bool = True
    reasons: bool = False


MODELS = {
    "chatml": AgentModel(CHATML, _chatml, calls=False),
    "chatml_tools": AgentModel(CHATML_TOOLS, _chatml),
    "qwen3": AgentModel(QWEN3, _chatml, reasons=True),
    "demo": AgentModel(DEMO, _demo),
}

"""How models write tool calls. The chat template shows which syntax a model was trained on.

begin OPEN name MIDDLE {arguments} CLOSE  between OPEN ... CLOSE  end
"""

from __future__ import annotations

import re
from typing import NamedTuple


class ToolCallSyntax(NamedTuple):
    """The marks around tool calls in one model family's output."""

    name: str
    trigger: str  # starts calls within free text; empty: only a whole text can be calls
    begin: str  # before the first call, the trigger included
    between: str
    end: str
    open: str = '{"name": "'
    middle: str = '", "arguments": '
    close: str = "}"
    short_ids: bool = False  # the template accepts only ids of nine letters and digits


HERMES = ToolCallSyntax(
    "hermes",
    trigger="<tool_call>",
    begin="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
"""Nous Hermes 2 Pro, Qwen 2.5 and 3."""

LLAMA3_JSON = ToolCallSyntax(
    "llama3_json",
    trigger="",
    begin="",
    between="; ",
    end="",
    middle='", "parameters": ',
)
"""Llama 3.1 and later: the whole answer is calls."""

MISTRAL = ToolCallSyntax(
    "mistral",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS][",
    between=", ",
    end="]",
    short_ids=True,
)
"""Mistral's tokenizers up to v7."""

MISTRAL_ARGS = ToolCallSyntax(
    "mistral_args",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    end="",
    open="",
    middle="[ARGS]",
    close="",
    short_ids=True,
)
"""Mistral's tokenizers from v11 on."""

SYNTAXES = {s.name: s for s in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS)}


def detect_syntax(template: str) -> ToolCallSyntax:
    """Return the syntax whose marks the template writes; HERMES where it writes none."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if re.search(r'\\?"parameters\\?"\s*:', template):
        return LLAMA3_JSON
    return HERMES

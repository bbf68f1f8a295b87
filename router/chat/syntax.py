"""How models write tool calls. The chat template shows which way its model was trained on.

begin OPEN name MIDDLE {arguments} CLOSE  between OPEN ... CLOSE  end
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Syntax(NamedTuple):
    name: str
    trigger: str  # in free text: here calls begin; empty: only the start of a text can be a call
    begin: str  # before the first call, the trigger included
    between: str
    end: str
    open: str
    middle: str
    close: str
    short_ids: bool = False  # ids of calls have nine letters and digits, or the template refuses


HERMES = Syntax(
    "hermes",
    trigger="<tool_call>",
    begin="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    open='{"name": "',
    middle='", "arguments": ',
    close="}",
)
"""Nous Hermes 2 Pro, Qwen 2.5 and 3."""

LLAMA3_JSON = Syntax(
    "llama3_json",
    trigger="",
    begin="",
    between="; ",
    end="",
    open='{"name": "',
    middle='", "parameters": ',
    close="}",
)
"""Llama 3.1 and later: the whole answer is a call."""

MISTRAL = Syntax(
    "mistral",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS][",
    between=", ",
    end="]",
    open='{"name": "',
    middle='", "arguments": ',
    close="}",
    short_ids=True,
)
"""Mistral's tokenizers up to v7."""

MISTRAL_ARGS = Syntax(
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


def detect(template: str) -> Syntax:
    """By the marks that a template writes; HERMES where it writes none."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if re.search(r'\\?"parameters\\?"\s*:', template):
        return LLAMA3_JSON
    return HERMES

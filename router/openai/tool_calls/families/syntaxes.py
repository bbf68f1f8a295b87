"""The tool call syntaxes that Baton knows, and the one that a model's chat template shows."""

from __future__ import annotations

from router.openai.parser_names import ToolParserName
from router.openai.tool_calls.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from router.openai.tool_calls.families.gemma import GEMMA4
from router.openai.tool_calls.families.hermes import HERMES
from router.openai.tool_calls.families.llama import LLAMA3_JSON
from router.openai.tool_calls.families.mistral import MISTRAL, MISTRAL_ARGS
from router.openai.tool_calls.families.pythonic import PYTHONIC
from router.openai.tool_calls.families.qwen_xml import QWEN3_CODER
from router.openai.tool_calls.tool_syntax import ToolCallSyntax

_IN_ORDER: tuple[ToolCallSyntax, ...] = (
    GEMMA4,
    DEEPSEEK_V31,
    DEEPSEEK_V3,
    MISTRAL_ARGS,
    MISTRAL,
    QWEN3_CODER,
    HERMES,
    PYTHONIC,
    LLAMA3_JSON,
)
"""The order in which templates are tried: the marks of the first ones are the rarest."""

SYNTAXES = {syntax.name: syntax for syntax in _IN_ORDER}


def detect_syntax(template: str) -> ToolCallSyntax:
    """Return the syntax that a chat template writes; HERMES where it writes none."""
    return next((one for one in _IN_ORDER if one.is_written_by(template)), HERMES)


def find_syntax(name: ToolParserName, template: str) -> ToolCallSyntax:
    """Return the syntax for a value of ``api.tool_parser``: ``auto`` or a name."""
    return detect_syntax(template) if name == "auto" else SYNTAXES[name]

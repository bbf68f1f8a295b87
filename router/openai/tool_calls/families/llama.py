"""Llama 3.1 and later: the whole answer is calls, as JSON objects with ``;`` between them."""

from __future__ import annotations

import re

from router.openai.tool_calls.marked_calls import MarkedCalls

_PYTHON_TAG = "<|python_tag|>"
_PARAMETERS = '", "parameters": '


class _LlamaCalls(MarkedCalls):
    """Llama's templates write no mark of their own, but the key of the arguments."""

    def is_written_by(self, template: str) -> bool:
        return re.search(r'\\?"parameters\\?"\s*:', template) is not None


LLAMA3_JSON = _LlamaCalls(
    "llama3_json",
    trigger="",
    begin="",
    between="; ",
    end="",
    middle=_PARAMETERS,
    before=_PYTHON_TAG,
    heads=(
        ('{"name": "', '", "arguments": '),
        ('{"type": "function", "name": "', _PARAMETERS),
        (_PYTHON_TAG + '{"name": "', _PARAMETERS),
    ),
)

"""Mistral's models. Their templates accept only ids of nine letters and digits."""

from __future__ import annotations

from router.openai.tool_calls.marked_calls import CALL_ID, MarkedCalls

MISTRAL = MarkedCalls(
    "mistral",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS][",
    between=", ",
    end="]",
    short_ids=True,
    without=("[ARGS]",),
)
"""Tokenizers up to v7."""

MISTRAL_ARGS = MarkedCalls(
    "mistral_args",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    end="",
    open="",
    middle="[ARGS]",
    close="",
    short_ids=True,
    heads=(("", f"[CALL_ID]{CALL_ID}[ARGS]"),),
    signs=("[TOOL_CALLS]", "[ARGS]"),
)
"""Tokenizers from v11 on. Some models write an id for each call, which becomes that of the call."""

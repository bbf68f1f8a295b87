"""What an engine tells its front of a step."""

from __future__ import annotations

from collections.abc import Sequence

from engine import messages as m
from engine.stepper import TokenOut


def tokens_of(drawn: Sequence[TokenOut]) -> list[m.Event]:
    """Of the tokens of one step: log-probabilities of a prompt go before its first one."""
    if not drawn:
        return []
    out: list[m.Event] = [
        m.PromptLogprobs(t.handle, t.prompt_logprobs) for t in drawn if t.prompt_logprobs
    ]
    handles, tokens, finishes, logprobs = zip(
        *((t.handle, t.token, t.finish, t.logprobs) for t in drawn), strict=True
    )
    asked = any(entry is not None for entry in logprobs)
    reports = list(logprobs) if asked else []
    out.append(m.Tokens(list(handles), list(tokens), list(finishes), reports))
    return out

"""What an engine tells its front of a step, and of itself."""

from __future__ import annotations

from collections.abc import Sequence

from engine import messages as m
from engine.core import Engine
from engine.sequence import Phase
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


def beat_of(engine: Engine) -> m.Beat:
    """The load, as it is now."""
    s = engine.scheduler
    queued = sum(q.remaining for q in s.queue if q.phase is Phase.WAITING)
    queued += sum(q.remaining for q in s.prefilling)
    waiting = len(s.sequences) - len(s.decoding)
    step_model = tuple(engine.step_time.known or ())
    free = engine.manager.available
    return m.Beat(len(s.decoding), waiting, queued, free, step_model, s.counters)

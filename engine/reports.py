"""What an engine tells its front of a step, and of itself."""

from __future__ import annotations

from collections.abc import Sequence

from engine import messages as m
from engine.core import Engine
from engine.counters import Counters
from engine.sequence import Phase
from engine.stepper import TokenOut

REMEMBER = 0.9
"""Of what earlier beats said of the pace, each beat leaves so much: the last five seconds count."""


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


class Pace:
    """Tokens that a sequence got of a step, over the last beats in which any decoded."""

    def __init__(self) -> None:
        self._seen = (0, 0)
        self._rows = self._accepted = 0.0

    def of(self, counters: Counters) -> float:
        """Asked once a beat."""
        before = self._seen
        self._seen = now = (counters.decode_rows, counters.speculation.accepted_tokens)
        if now[0] > before[0]:
            self._rows = REMEMBER * self._rows + now[0] - before[0]
            self._accepted = REMEMBER * self._accepted + now[1] - before[1]
        return 1.0 + self._accepted / max(1.0, self._rows)


def beat_of(engine: Engine, pace: Pace) -> m.Beat:
    """The load, as it is now."""
    s = engine.scheduler
    queued = sum(q.remaining for q in s.queue if q.phase is Phase.WAITING)
    queued += sum(q.remaining for q in s.prefilling)
    waiting = len(s.sequences) - len(s.decoding)
    step_model = tuple(engine.step_time.known or ())
    free = engine.manager.available
    return m.Beat(
        *(len(s.decoding), waiting, queued, free, step_model, s.counters),
        tokens_per_step=pace.of(s.counters),
    )

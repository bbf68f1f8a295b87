"""A ``DecodeRequest`` in the hand-over model: what ends it, hands it back or starts it again.

Each function stands for the methods that its docstring names, and returns the state after.
"""

from __future__ import annotations

from tests.models.handover_states import (
    COMPUTED,
    QUEUED,
    STARTED,
    UP,
    Bounds,
    Call,
    DecodeRequestState,
    HandoverState,
    Message,
)


def emit(
    bounds: Bounds, s: HandoverState, d: int, request: DecodeRequestState, *what: object
) -> HandoverState:
    """RouterLink.emit: what is meant for a stream that has ended is dropped."""
    link = s.workers[d].link
    kind, *rest = what
    is_lost = request.orphan and "any_submission_emits" not in bounds.mutations
    if is_lost or link.broken or not link.attached:
        return s
    message = (kind, request.attempt, *rest)
    return s.with_link(d, link._replace(to_router=(*link.to_router, message)))


def end_request(bounds: Bounds, s: HandoverState, d: int, i: int) -> HandoverState:
    """DecodeRequest._end, also of ``cancel``."""
    s = drop_sequence(bounds, s, d, i)
    return s.with_request(d, i, None)


def drop_sequence(bounds: Bounds, s: HandoverState, d: int, i: int) -> HandoverState:
    """DecodeRequest._drop_sequence, and the end of the call, if one is open."""
    request = s.workers[d].requests[i]
    if request.phase == QUEUED:
        return s
    if "drop_forgotten" not in bounds.mutations:
        s = command(s, d, ("drop", request.attempt, request.sequence))
    found = find_call(s, d, request)
    return s if found < 0 else s.with_call(found, close_call(s.calls[found]))


def close_call(call: Call) -> Call | None:
    """Return the call after its decode worker has ended it; None: nothing is left of it."""
    if call.served not in (STARTED, COMPUTED):
        return None
    return call._replace(open=False, frames=(), events=())


def fail(bounds: Bounds, s: HandoverState, d: int, i: int, cause: str) -> HandoverState:
    """DecodeRequest._fail and .hand_back."""
    s = emit(bounds, s, d, s.workers[d].requests[i], "error", cause)
    return end_request(bounds, s, d, i)


def retry(bounds: Bounds, s: HandoverState, d: int, i: int, *, struck_off: bool) -> HandoverState:
    """DecodeRequest._drop_attempt, after which ``_place`` starts again."""
    s = drop_sequence(bounds, s, d, i)
    request = s.workers[d].requests[i]
    candidates = request.candidates[1:] if struck_off else request.candidates
    again = request._replace(
        phase=QUEUED,
        failures=request.failures + 1,
        candidates=candidates,
        arrived=0,
        looked_up=False,
        due=False,
        reserving=False,
    )
    return s.with_request(d, i, again)


def on_token(
    bounds: Bounds, s: HandoverState, d: int, i: int, token: object, *, finish: bool
) -> HandoverState:
    """DecodeRequest.on_token."""
    request = s.workers[d].requests[i]
    s = emit(bounds, s, d, request, "token", token, finish)
    if finish:
        return end_request(bounds, s, d, i)
    return s.with_request(d, i, request._replace(emitted=request.emitted + 1))


def command(s: HandoverState, d: int, message: Message) -> HandoverState:
    """EngineSession.send: nothing reaches an engine that has died."""
    worker = s.workers[d]
    if worker.engine != UP:
        return s
    return s.with_worker(d, worker._replace(commands=(*worker.commands, message)))


def find_request(s: HandoverState, d: int, attempt: object) -> int:
    requests = s.workers[d].requests
    return next((i for i, r in enumerate(requests) if r.attempt == attempt), -1)


def find_call(s: HandoverState, d: int, request: DecodeRequestState) -> int:
    wanted = d, request.attempt, request.sequence
    return next((i for i, c in enumerate(s.calls) if c.open and c[:3] == wanted), -1)


def context_tokens(bounds: Bounds, request: DecodeRequestState) -> int:
    """DecodeRequest._resumed: the number of output tokens in the context of a sequence."""
    return request.base if "retried_from_base" in bounds.mutations else request.emitted

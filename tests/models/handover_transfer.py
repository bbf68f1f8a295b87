"""Steps of ``Handover``: a prefill that a decode worker has made elsewhere.

Each function stands for the methods that its docstring names, and yields (label, state after).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.models.handover_request import (
    close_call,
    command,
    context_tokens,
    emit,
    fail,
    find_call,
    on_token,
    retry,
)
from tests.models.handover_states import (
    DECODING,
    LOST,
    MAX_DEATHS,
    RECEIVING,
    REFUSED,
    UP,
    Bounds,
    Call,
    HandoverState,
)

Steps = Iterator[tuple[str, HandoverState]]


def ask(bounds: Bounds, s: HandoverState, d: int, i: int) -> HandoverState:
    """PrefillRunCall.start, while the engine here looks the prompt up."""
    request = s.workers[d].requests[i]
    prefill, instance = request.candidates[0]
    context = context_tokens(bounds, request)
    call = Call(d, request.attempt, request.sequence, prefill, instance, context)
    return s._replace(calls=tuple(sorted((*s.calls, call))))


def hand_over(bounds: Bounds, s: HandoverState, d: int, i: int) -> Steps:
    """Handover.first_token, .remaining_kv and ._receive; InboundTransfer.run."""
    request = s.workers[d].requests[i]
    found = find_call(s, d, request)
    if found < 0:
        return
    call = s.calls[found]
    if call.served in (LOST, REFUSED) and "silence_unnoticed" not in bounds.mutations:
        yield f"D{d} finds that P{call.prefill} {call.served} it", call_failed(bounds, s, d, i)
    if call.events:
        yield from _read_call_event(bounds, s, d, i, found)
    for place_in_flight in sorted({call.frames.index(sound) for sound in call.frames}):
        after = _take_frame(bounds, s, d, i, found, place_in_flight)
        yield f"D{d} gets a frame, sound: {call.frames[place_in_flight]}", after


def _read_call_event(bounds: Bounds, s: HandoverState, d: int, i: int, found: int) -> Steps:
    call, request = s.calls[found], s.workers[d].requests[i]
    (kind, *rest), others = call.events[0], call.events[1:]
    s = s.with_call(found, call._replace(events=others, accepted=True))
    if kind == "started":
        yield f"D{d} hears that P{call.prefill} started a long prompt", s
        yield f"D{d} hears that P{call.prefill} started a short prompt", _pages_due(bounds, s, d, i)
        return
    token, finish = rest
    s = on_token(bounds, s, d, i, token, finish=bool(finish))
    if not finish:
        request = s.workers[d].requests[i]
        s = s.with_request(d, i, request._replace(phase=RECEIVING))
        s = _join_if_complete(bounds, _pages_due(bounds, s, d, i), d, i)
    yield f"D{d} hears the first token, {token}", s


def looked_up(bounds: Bounds, s: HandoverState, d: int, i: int) -> HandoverState:
    """Handover._receive, and the end of DecodeRequest._look_up_prefix."""
    request = s.workers[d].requests[i]
    return _reserve(bounds, s.with_request(d, i, request._replace(looked_up=True)), d, i)


def _pages_due(bounds: Bounds, s: HandoverState, d: int, i: int) -> HandoverState:
    """Handover._on_started, and .first_token."""
    request = s.workers[d].requests[i]
    return _reserve(bounds, s.with_request(d, i, request._replace(due=True)), d, i)


def _reserve(bounds: Bounds, s: HandoverState, d: int, i: int) -> HandoverState:
    """Handover._receive: KV flows once the engine has answered Reserve (``read_event``)."""
    request = s.workers[d].requests[i]
    if request.reserving or not (request.due and request.looked_up):
        return s
    if "granted_before_reserved" in bounds.mutations:
        found = find_call(s, d, request)
        s = s.with_call(found, s.calls[found]._replace(granted=True))
    s = s.with_request(d, i, request._replace(reserving=True))
    return command(s, d, ("reserve", request.attempt, request.sequence))


def _take_frame(
    bounds: Bounds, s: HandoverState, d: int, i: int, found: int, place_in_flight: int
) -> HandoverState:
    """InboundTransfer._on_frame and ._ingest: frames may arrive in any order."""
    call, request, worker = s.calls[found], s.workers[d].requests[i], s.workers[d]
    sound = call.frames[place_in_flight]
    left = (*call.frames[:place_in_flight], *call.frames[place_in_flight + 1 :])
    s = s.with_call(found, call._replace(frames=left))
    s = s.with_request(d, i, request._replace(arrived=request.arrived + 1))
    if worker.engine == UP:
        message = (request.attempt, request.sequence, sound)
        worker = s.workers[d]
        s = s.with_worker(d, worker._replace(ingests=(*worker.ingests, message)))
    return _join_if_complete(bounds, s, d, i)


def _join_if_complete(bounds: Bounds, s: HandoverState, d: int, i: int) -> HandoverState:
    """The end of DecodeRequest._prefill_elsewhere: Join, and the end of the call."""
    request = s.workers[d].requests[i]
    due = bounds.frames - ("join_before_last_frame" in bounds.mutations)
    if request.phase != RECEIVING or request.arrived < due:
        return s
    s = command(s, d, ("join", request.attempt, request.sequence, request.arrived))
    found = find_call(s, d, request)
    s = s.with_call(found, close_call(s.calls[found]))
    return s.with_request(d, i, request._replace(phase=DECODING))


def call_failed(bounds: Bounds, s: HandoverState, d: int, i: int) -> HandoverState:
    """DecodeRequest._drop_attempt and ._count_death: PeerLost or PeerRefused."""
    call = s.calls[find_call(s, d, s.workers[d].requests[i])]
    s = retry(bounds, s, d, i, struck_off=True)
    if call.served == REFUSED or not call.accepted:
        return s
    request = s.workers[d].requests[i]
    s = emit(bounds, s, d, request, "death")
    s = s.with_request(d, i, request._replace(deaths=request.deaths + 1))
    return fail(bounds, s, d, i, "fatal") if request.deaths + 1 >= MAX_DEATHS else s

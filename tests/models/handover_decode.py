"""Steps of a decode worker's front: ``DecodeService``, and where ``DecodeRequest`` is placed.

Each function stands for the methods that its docstring names, and yields (label, state after).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.models.handover_request import (
    command,
    context_tokens,
    drop_sequence,
    end_request,
    fail,
    find_call,
    find_request,
    on_token,
    retry,
)
from tests.models.handover_states import (
    DEAD,
    DOWN,
    ELSEWHERE,
    HERE,
    MAX_TRANSFERS,
    QUEUED,
    RECEIVING,
    Bounds,
    DecodeRequestState,
    HandoverState,
)
from tests.models.handover_transfer import ask, hand_over, looked_up

Steps = Iterator[tuple[str, HandoverState]]


def decode_steps(bounds: Bounds, s: HandoverState, d: int) -> Steps:
    worker = s.workers[d]
    if not worker.front:
        return
    if worker.link.to_worker and not worker.link.broken:
        yield f"D{d} reads {worker.link.to_worker[0]}", read_message(bounds, s, d)
    if any(request.orphan for request in worker.requests):
        yield f"D{d} notices that its stream ended", detach_stream(bounds, s, d)
    if worker.engine == DEAD and "engine_death_unnoticed" not in bounds.mutations:
        yield f"D{d} notices that its engine died", engine_lost(bounds, s, d)
    if worker.events:
        yield f"D{d} hears {worker.events[0]}", read_event(bounds, s, d)
        if worker.events[0][0] == "found":
            yield f"D{d} finds enough cached", read_event(bounds, s, d, enough=True)
    for i, request in enumerate(worker.requests):
        if request.phase == QUEUED:
            yield from place(bounds, s, d, i)
        elif request.phase in (ELSEWHERE, RECEIVING):
            yield from hand_over(bounds, s, d, i)


def read_message(bounds: Bounds, s: HandoverState, d: int) -> HandoverState:
    """DecodeService._read and ._submit."""
    worker = s.workers[d]
    (kind, attempt, *rest), others = worker.link.to_worker[0], worker.link.to_worker[1:]
    s = s.with_link(d, worker.link._replace(to_worker=others))
    if kind == "submit":
        emitted, candidates, deaths = rest
        new = DecodeRequestState(attempt, emitted, emitted, candidates, deaths=deaths)  # type: ignore[arg-type]
        return s.with_worker(d, s.workers[d]._replace(requests=(*worker.requests, new)))
    for i, request in enumerate(worker.requests):
        if request.attempt == attempt and not request.orphan:
            return end_request(bounds, s, d, i)
    return s  # it has ended


def detach_stream(bounds: Bounds, s: HandoverState, d: int) -> HandoverState:
    """RouterLink.close, which cancels the requests of the stream."""
    for i in reversed(range(len(s.workers[d].requests))):
        if s.workers[d].requests[i].orphan:
            s = end_request(bounds, s, d, i)
    return s


def engine_lost(bounds: Bounds, s: HandoverState, d: int) -> HandoverState:
    """DecodeRequest.on_lost of every request that has a sequence."""
    s = s.with_worker(d, s.workers[d]._replace(engine=DOWN))
    for i in reversed(range(len(s.workers[d].requests))):
        if s.workers[d].requests[i].phase != QUEUED:
            s = fail(bounds, s, d, i, "retryable")
    return s


def place(bounds: Bounds, s: HandoverState, d: int, i: int) -> Steps:
    """DecodeRequest._place, ._try_to_place, ._prefill_here and ._prefill_elsewhere."""
    worker, request = s.workers[d], s.workers[d].requests[i]
    if worker.engine == DOWN:
        yield f"D{d} waits for no engine", fail(bounds, s, d, i, "moved")
        return
    elsewhere = bool(request.candidates) and request.failures < MAX_TRANSFERS
    if not elsewhere:
        yield f"D{d} computes the prompt", prefill_here(bounds, s, d, i)
        return
    placed = request._replace(phase=ELSEWHERE, sequence=request.sequence + 1)
    s = s.with_request(d, i, placed)
    message = ("receive", request.attempt, placed.sequence, context_tokens(bounds, request))
    yield f"D{d} sends {message}, and asks", ask(bounds, command(s, d, message), d, i)


def prefill_here(bounds: Bounds, s: HandoverState, d: int, i: int) -> HandoverState:
    """DecodeRequest._prefill_here."""
    s = drop_sequence(bounds, s, d, i)
    request = s.workers[d].requests[i]
    here = request._replace(phase=HERE, sequence=request.sequence + 1, due=False, reserving=False)
    message = ("generate", request.attempt, here.sequence, context_tokens(bounds, request))
    return command(s.with_request(d, i, here), d, message)


def read_event(bounds: Bounds, s: HandoverState, d: int, *, enough: bool = False) -> HandoverState:
    """DecodeRequest.on_event and .on_token; a detached sequence's events no longer arrive.
    ``enough``: DecodeRequest._look_up_prefix raises EnoughCached."""
    worker = s.workers[d]
    (kind, attempt, sequence, *rest), others = worker.events[0], worker.events[1:]
    s = s.with_worker(d, worker._replace(events=others))
    i = find_request(s, d, attempt)
    if i < 0:
        return s
    request = s.workers[d].requests[i]
    if request.phase == QUEUED or request.sequence != sequence:
        return s
    if kind == "found":
        return (prefill_here if enough else looked_up)(bounds, s, d, i)
    if kind == "reserved":
        found = find_call(s, d, request)
        return s if found < 0 else s.with_call(found, s.calls[found]._replace(granted=True))
    if kind == "receive failed":
        return retry(bounds, s, d, i, struck_off=False)
    return on_token(bounds, s, d, i, rest[0], finish=bool(rest[1]))

"""The model of the hand-over: its steps and faults together, and what must hold.

One request, one router, two decode workers and two prefill workers. Messages between processes are
queues; streams and calls break and lose what is on their way; frames overtake one another and
everything else; processes die and come back; a process that stands still is one whose peers take
it for dead. A stop of any length is covered, because any process may take its next step at any
time. Deadlines that would end a request in any case (``next_token_timeout_s`` of a router) are left
out: it must come to its end without them. Left out as well are look-ups that find the prompt
cached, fetches from peers and the number of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.models.explorer import Model
from tests.models.handover_decode import decode_steps
from tests.models.handover_engines import (
    engine_steps,
    kill_decode_front,
    kill_engine,
    kill_prefill,
    prefill_steps,
)
from tests.models.handover_reduction import tidied
from tests.models.handover_request import fail, find_call, retry
from tests.models.handover_router import end, router_steps
from tests.models.handover_states import (
    COMPUTED,
    DISCONNECTED,
    ELSEWHERE,
    ENDED,
    FAILED,
    FINISHED,
    HOLDS_PAGES,
    LOST,
    MAX_DEATHS,
    RECEIVING,
    STARTED,
    UP,
    Bounds,
    HandoverState,
)
from tests.models.handover_transfer import call_failed

Steps = Iterator[tuple[str, HandoverState]]


def handover_model(bounds: Bounds) -> Model[HandoverState]:
    after = tidied if bounds.reduced else _unchanged
    return Model(
        initial=HandoverState(faults_left=bounds.faults),
        steps=lambda s: _then(after, steps(bounds, s)),
        faults=lambda s: _then(after, faults(bounds, s)),
        violation=lambda s: violation(bounds, s),
        unclean=unclean,
    )


def _unchanged(s: HandoverState) -> HandoverState:
    return s


def _then(after: Callable[[HandoverState], HandoverState], found: Steps) -> Steps:
    return ((label, after(s)) for label, s in found)


def steps(bounds: Bounds, s: HandoverState) -> Steps:
    yield from router_steps(bounds, s)
    for d in (0, 1):
        yield from decode_steps(bounds, s, d)
        yield from engine_steps(bounds, s, d)
    yield from prefill_steps(bounds, s)


# ---- Faults -------------------------------------------------------------------------------------


def faults(bounds: Bounds, s: HandoverState) -> Steps:
    """Faults that can make a difference here; once the request has ended they cannot."""
    if not s.faults_left or s.router.phase in ENDED:
        return
    s = s._replace(faults_left=s.faults_left - 1)
    yield "the client hangs up", end(bounds, s, DISCONNECTED)
    for d in (0, 1):
        worker = s.workers[d]
        if worker.front:
            yield f"front of D{d} dies", kill_decode_front(s, d)
        if worker.front and worker.engine == UP:
            yield f"engine of D{d} dies", kill_engine(s, d)
        if worker.link.attached and not worker.link.broken:
            yield f"the stream to D{d} is cut", cut_stream(s, d)
        for i in range(len(worker.requests)):
            yield f"D{d} drains", fail(bounds, s, d, i, "moved")
            yield from _faults_of_call(bounds, s, d, i)
    for p in (0, 1):
        if s.prefills[p].alive:
            yield f"P{p} dies", kill_prefill(s, p, front=True)
            yield f"engine of P{p} dies", kill_prefill(s, p, front=False)


def cut_stream(s: HandoverState, d: int) -> HandoverState:
    """What is on its way is lost; what came before it is covered by a cut that comes later."""
    worker = s.workers[d]
    link = worker.link._replace(broken=True, to_worker=(), to_router=())
    requests = tuple(r._replace(orphan=True) for r in worker.requests)
    return s.with_worker(d, worker._replace(link=link, requests=requests))


def _faults_of_call(bounds: Bounds, s: HandoverState, d: int, i: int) -> Steps:
    request = s.workers[d].requests[i]
    found = find_call(s, d, request)
    if request.phase not in (ELSEWHERE, RECEIVING) or found < 0:
        return
    call = s.calls[found]
    # CarrierFailed, NoPages, PREFILL_S and FRAME_S: the same prefill worker is asked again.
    yield f"the transfer to D{d} fails", retry(bounds, s, d, i, struck_off=False)
    if call.served in (STARTED, COMPUTED):
        silent = s.with_call(found, call._replace(served=LOST))
        after = call_failed(bounds, silent, d, i)
        # P still has the pages: it frees them when it goes on, and finds that the call has ended.
        working = call._replace(open=False, frames=(), events=())
        after = after._replace(calls=tuple(sorted((*after.calls, working))))
        yield f"P{call.prefill} stands still, and D{d} takes it for dead", after
    if True in call.frames:
        frames = tuple(sorted((*call.frames[:-1], False)))
        yield "a frame is damaged", s.with_call(found, call._replace(frames=frames))


# ---- What must hold -----------------------------------------------------------------------------


def violation(bounds: Bounds, s: HandoverState) -> str:
    router = s.router
    if router.received != tuple(range(len(router.received))):
        return f"the client got {router.received}"
    if router.phase == FINISHED and len(router.received) != bounds.tokens:
        return f"the stream finished after {len(router.received)} tokens of {bounds.tokens}"
    if router.phase == FAILED and router.deaths < MAX_DEATHS:
        return f"the stream failed after {router.deaths} deaths"
    if router.deaths > bounds.faults - s.faults_left:
        return f"{router.deaths} deaths were counted for {bounds.faults - s.faults_left} faults"
    for d in (0, 1):
        if fault := _without_owner(s, d):
            return fault
    return ""


def _without_owner(s: HandoverState, d: int) -> str:
    """Whether D works on a request for which nothing answers, or its engine on a sequence."""
    worker, router = s.workers[d], s.router
    for request in worker.requests:
        is_owned = router.sink and router.worker == d and router.attempt == request.attempt
        told = any(m[:2] == ("cancel", request.attempt) for m in worker.link.to_worker)
        if not (is_owned or told or request.orphan or worker.link.broken):
            return f"D{d} works on submission {request.attempt}, which the router has given up"
    owned = {(r.attempt, r.sequence) for r in worker.requests}
    dropped = {m[1:3] for m in worker.commands if m[0] == "drop"}
    for sequence in worker.sequences:
        if worker.engine == UP and sequence[:2] not in owned | dropped:
            return f"the engine of D{d} has sequence {sequence[:2]}, which no request owns"
        if sequence.written and not sequence.reserved:
            return f"the engine of D{d} has KV of {sequence[:2]}, and no pages for it"
    return ""


def unclean(s: HandoverState) -> str:
    """What is wrong if nothing more happens."""
    if s.router.phase not in ENDED:
        return f"the request waits for ever: {s.router.phase}"
    if any(call.served in HOLDS_PAGES for call in s.calls):
        return "pages of a prefill worker are never freed"
    if s.calls or any(w.requests or w.sequences or w.link.to_worker for w in s.workers):
        return "work is left for a request that has ended"
    return ""

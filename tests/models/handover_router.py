"""Steps of the router: ``ChoiceStream``, ``TokenQueue``, ``Submission`` and ``DecodeLink``.

Each function stands for the methods that its docstring names, and yields (label, state after).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.models.handover_states import (
    CREATED,
    ENDED,
    FAILED,
    FINISHED,
    MAX_DEATHS,
    MISSING,
    RESUBMITTED,
    SUBMITTED,
    Bounds,
    HandoverState,
    Link,
    RouterState,
)

Steps = Iterator[tuple[str, HandoverState]]


def router_steps(bounds: Bounds, s: HandoverState) -> Steps:
    if s.router.phase in (CREATED, RESUBMITTED):
        yield from submit(bounds, s)
    elif s.router.phase == SUBMITTED:
        yield from take(bounds, s)
    for d in (0, 1):
        link = s.workers[d].link
        if link.attached and link.to_router:
            yield f"router reads {link.to_router[0]} of D{d}", dispatch(bounds, s, d)
        if link.attached and link.broken and "link_loss_unnoticed" not in bounds.mutations:
            yield f"router notices that the stream to D{d} ended", detach(s, d)
        if not link.attached and s.workers[d].front:
            yield f"router attaches to D{d} again", attach(s, d)


def submit(bounds: Bounds, s: HandoverState) -> Steps:
    """ChoiceStream.start and ._resubmit: Placer.place, then DecodeLink.submit.

    A worker that failed this request is used only when there is no other. Workers in the same state
    are interchangeable, so the first one stands for both; so do prefill workers."""
    router = s.router
    ready = [d for d in (0, 1) if s.workers[d].link.attached]
    fresh = [d for d in ready if not router.failed[d]] or ready
    if fresh == [0, 1] and s.workers[0] == s.workers[1] and not s.calls:
        fresh = [0]
    named = tuple((p, w.instance) for p, w in enumerate(s.prefills) if w.alive)
    interchangeable = s.prefills[0] == s.prefills[1] and not s.calls
    orders = [named] if len(named) < 2 or interchangeable else [named, named[::-1]]
    for d in fresh:
        for candidates in orders:
            after = _submit_to(bounds, s, d, candidates)
            yield f"router submits to D{d}, prefill {candidates}", after


def _submit_to(
    bounds: Bounds, s: HandoverState, d: int, candidates: tuple[tuple[int, int], ...]
) -> HandoverState:
    router, link = s.router, s.workers[d].link
    emitted = len(router.received)
    if "resubmitted_without_tokens" in bounds.mutations:
        emitted = 0
    message = ("submit", router.attempt + 1, emitted, candidates, router.deaths)
    if not link.broken:
        s = s.with_link(d, link._replace(to_worker=(*link.to_worker, message)))
    submitted = router._replace(phase=SUBMITTED, attempt=router.attempt + 1, worker=d, sink=True)
    return s._replace(router=submitted)


def take(bounds: Bounds, s: HandoverState) -> Steps:
    """ChoiceStream._next_tokens, ._received_batch and ._recover."""
    router = s.router
    if router.queue or router.finish:
        left = bounds.tokens - len(router.received)
        is_last = router.finish or len(router.queue) >= left
        router = router._replace(received=router.received + router.queue[:left], queue=())
        s = s._replace(router=router)
        yield "router takes tokens", end(bounds, s, FINISHED) if is_last else s
    elif router.interruption:
        yield f"router recovers: {router.interruption}", _recover(bounds, s)


def _recover(bounds: Bounds, s: HandoverState) -> HandoverState:
    router = s.router
    if router.interruption == "fatal":
        return end(bounds, s, FAILED)
    s = release(bounds, s)
    failed = (router.failed[0] or router.worker == 0, router.failed[1] or router.worker == 1)
    deaths = router.deaths + (router.interruption != "moved")
    router = s.router._replace(interruption="", failed=failed, deaths=deaths, phase=RESUBMITTED)
    s = s._replace(router=router)
    return end(bounds, s, FAILED) if deaths >= MAX_DEATHS else s


def end(bounds: Bounds, s: HandoverState, phase: str) -> HandoverState:
    """ChoiceStream.close. What is of no more meaning is forgotten."""
    s = release(bounds, s)
    r = s.router
    ended = RouterState(phase, r.attempt, received=r.received, deaths=r.deaths)
    return s._replace(router=ended)


def release(bounds: Bounds, s: HandoverState) -> HandoverState:
    """Submission.release and DecodeLink.cancel."""
    router = s.router
    if not router.sink:
        return s
    link = s.workers[router.worker].link
    if not link.broken and "cancel_forgotten" not in bounds.mutations:
        message = ("cancel", router.attempt)
        overtakes = "cancel_overtakes_submit" in bounds.mutations
        queue = (message, *link.to_worker) if overtakes else (*link.to_worker, message)
        s = s.with_link(router.worker, link._replace(to_worker=queue))
    return s._replace(router=router._replace(sink=False))


def dispatch(bounds: Bounds, s: HandoverState, d: int) -> HandoverState:
    """DecodeLink._dispatch, Submission.on_output and TokenQueue.put."""
    link = s.workers[d].link
    (kind, attempt, *rest), others = link.to_router[0], link.to_router[1:]
    s = s.with_link(d, link._replace(to_router=others))
    router = s.router
    expected = router.sink and router.worker == d and router.attempt == attempt
    if "any_submission_emits" in bounds.mutations:
        expected = router.phase not in ENDED
    if not expected:  # was cancelled while this output was on its way
        return s
    if kind == "token":
        value, finish = rest
        queue = (*router.queue, int(str(value)))
        router = router._replace(queue=queue, finish=bool(finish), sink=not finish)
    elif kind == "death":
        router = router._replace(deaths=router.deaths + 1)
    else:
        router = _interrupted(bounds, router, str(rest[0]))
    return s._replace(router=router)


def _interrupted(bounds: Bounds, router: RouterState, cause: str) -> RouterState:
    """TokenQueue.interrupt: tokens that wait are taken first."""
    queue, received = router.queue, router.received
    if "interruption_drops_queue" in bounds.mutations:
        queue, received = (), received + tuple(MISSING for _ in queue)
    return router._replace(interruption=cause, sink=False, queue=queue, received=received)


def detach(s: HandoverState, d: int) -> HandoverState:
    """DecodeLink._detach and Submission.on_link_lost."""
    s = s.with_link(d, Link(attached=False))
    router = s.router
    if router.sink and router.worker == d:
        router = router._replace(sink=False, interruption="lost")
    return s._replace(router=router)


def attach(s: HandoverState, d: int) -> HandoverState:
    """DecodeLink._attach, to the worker that lives there now."""
    return s.with_link(d, Link())

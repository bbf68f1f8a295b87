"""Makes the hand-over model smaller: what nothing will ever hear of is tidied up at once.

A message to a sequence, a submission or a call that has been given up changes nothing but itself,
whenever it is handled: numbers are never used twice, so what is stale stays stale. Such steps can
be put in any order with all others, and one order stands for all of them (partial-order reduction).
Without the reduction every order is explored; ``test_handover_model.py`` does that, too.
"""

from __future__ import annotations

from tests.models.handover_states import (
    HOLDS_PAGES,
    DecodeWorkerState,
    HandoverState,
    RouterState,
)


def tidied(s: HandoverState) -> HandoverState:
    """Return the state after every step that only clears away what was given up."""
    workers = (_tidied_worker(s.router, s.workers[0], 0), _tidied_worker(s.router, s.workers[1], 1))
    calls = s.calls
    if any(not call.open for call in calls):
        calls = tuple(c for c in calls if c.open or c.served not in HOLDS_PAGES)
    return s._replace(workers=workers, calls=calls)


def _tidied_worker(router: RouterState, worker: DecodeWorkerState, d: int) -> DecodeWorkerState:
    link = worker.link
    if link.to_router:
        expected = router.sink and router.worker == d
        heard = tuple(m for m in link.to_router if expected and m[1] == router.attempt)
        link = link._replace(to_router=heard)
    if any(m[0] == "cancel" for m in link.to_worker):
        here = {r.attempt for r in worker.requests}
        unread = {m[1] for m in link.to_worker if m[0] == "cancel"} - here
        link = link._replace(to_worker=tuple(m for m in link.to_worker if m[1] not in unread))
    worker = worker._replace(link=link)
    if not (worker.events or worker.sequences or worker.commands or worker.ingests):
        return worker
    attached = {(r.attempt, r.sequence) for r in worker.requests if r.phase != "queued"}
    dropped = {m[1:3] for m in worker.commands if m[0] == "drop"}
    return worker._replace(
        events=tuple(m for m in worker.events if m[1:3] in attached),
        sequences=tuple(q for q in worker.sequences if q[:2] not in dropped),
        commands=tuple(m for m in worker.commands if m[1:3] not in dropped),
        ingests=tuple(m for m in worker.ingests if m[:2] not in dropped and m[:2] in attached),
    )

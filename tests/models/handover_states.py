"""States of the hand-over model: one request, one router, two decode and two prefill workers.

    Router --Link--> Worker (front, engine)  --Call--> prefill worker
      ^                |  commands, ingests --> engine --> events
      +--- outputs ----+

Every state is a tuple of tuples, so that it can be hashed. A token stands for its position in the
output: the text is 0, 1, 2 and so on, and ``BAD`` is a token that was computed from wrong KV.
"""

from __future__ import annotations

from typing import NamedTuple

BAD = -1
MISSING = -2
"""A token that the router counts as sent, although its client has not got it."""

MAX_DEATHS = 3
"""Deaths under one request that end it with an error; a smaller number never does."""

MAX_TRANSFERS = 3
"""``decode_worker.candidates.MAX_TRANSFERS``."""

# ChoiceStream, whose diagram has these states.
CREATED, SUBMITTED, RESUBMITTED = "created", "submitted", "resubmitted"
FINISHED, FAILED, DISCONNECTED = "finished", "failed", "disconnected"
ENDED = (FINISHED, FAILED, DISCONNECTED)

# DecodeRequest, whose diagram has these states.
QUEUED, ELSEWHERE = "queued", "prefill elsewhere"
RECEIVING, DECODING, HERE = "receiving KV", "decoding", "prefilling here"

# One Prefill.Run call as the prefill worker has it.
ASKED, STARTED, COMPUTED, DROPPING = "asked", "started", "computed", "dropping"
REFUSED, LOST = "refused", "lost"
HOLDS_PAGES = (STARTED, COMPUTED, DROPPING)

# EngineClient: the engine serves, has died without being noticed, or is being replaced.
UP, DEAD, DOWN = "up", "dead", "down"

Message = tuple[object, ...]


class Bounds(NamedTuple):
    """How much is explored, and which rules are broken on purpose (``mutations``)."""

    tokens: int = 2  # of the text
    frames: int = 2  # of one transfer
    faults: int = 1
    mutations: frozenset[str] = frozenset()
    reduced: bool = True  # handover_reduction.py


class RouterState(NamedTuple):
    """``ChoiceStream``, with its ``TokenQueue`` and its last ``Submission``."""

    phase: str = CREATED
    attempt: int = 0  # number of submissions
    worker: int = -1  # decode worker of the last one
    sink: bool = False  # DecodeLink still has the submission
    received: tuple[int, ...] = ()
    queue: tuple[int, ...] = ()
    finish: bool = False
    interruption: str = ""  # "lost", "retryable", "moved" or "fatal"
    deaths: int = 0
    failed: tuple[bool, bool] = (False, False)  # _failed_instances


class Link(NamedTuple):
    """One Decode.Attach stream. ``broken``: nothing passes, and the router has yet to notice it."""

    attached: bool = True
    broken: bool = False
    to_worker: tuple[Message, ...] = ()
    to_router: tuple[Message, ...] = ()


class DecodeRequestState(NamedTuple):
    """``DecodeRequest``. Its sequence in the engine is (attempt, sequence)."""

    attempt: int
    base: int  # tokens that came with the Submit
    emitted: int  # these, and those that were sent
    candidates: tuple[tuple[int, int], ...]  # prefill worker and its instance, best first
    phase: str = QUEUED
    orphan: bool = False  # its stream has ended, which this worker has yet to notice
    sequence: int = 0  # of the last one
    failures: int = 0
    deaths: int = 0
    arrived: int = 0  # frames that were given to the engine
    looked_up: bool = False  # the engine has said what is cached here
    due: bool = False  # pages are to be reserved
    reserving: bool = False


class EngineSequence(NamedTuple):
    """A sequence in a decode worker's engine, which holds pages."""

    attempt: int
    sequence: int
    length: int  # output tokens in its context
    here: bool  # Generate; else Receive
    reserved: bool = False
    written: int = 0  # frames
    sound: bool = True  # what was written passed its check
    refused: bool = False
    joined: int = -1  # frames that Join names; -1: before Join


class DecodeWorkerState(NamedTuple):
    front: bool = True
    engine: str = UP
    requests: tuple[DecodeRequestState, ...] = ()
    sequences: tuple[EngineSequence, ...] = ()
    commands: tuple[Message, ...] = ()  # to the engine
    ingests: tuple[Message, ...] = ()  # to its copy thread, by a socket of their own
    events: tuple[Message, ...] = ()  # from the engine
    link: Link = Link()


class Call(NamedTuple):
    """One Prefill.Run call, both its ends, and the frames of its transfer."""

    worker: int
    attempt: int
    sequence: int
    prefill: int
    instance: int
    length: int  # output tokens in the context
    open: bool = True  # at the decode worker
    accepted: bool = False  # as the decode worker knows
    granted: bool = False  # pages are there: KV may flow
    served: str = ASKED
    sent: int = 0  # frames
    frames: tuple[bool, ...] = ()  # under way; False: damaged
    events: tuple[Message, ...] = ()


class PrefillWorkerState(NamedTuple):
    alive: bool = True
    instance: int = 0


class HandoverState(NamedTuple):
    router: RouterState = RouterState()
    workers: tuple[DecodeWorkerState, DecodeWorkerState] = (
        DecodeWorkerState(),
        DecodeWorkerState(),
    )
    prefills: tuple[PrefillWorkerState, PrefillWorkerState] = (
        PrefillWorkerState(),
        PrefillWorkerState(),
    )
    calls: tuple[Call, ...] = ()
    faults_left: int = 0

    def with_worker(self, d: int, worker: DecodeWorkerState) -> HandoverState:
        workers = (worker, self.workers[1]) if d == 0 else (self.workers[0], worker)
        return self._replace(workers=workers)

    def with_prefill(self, p: int, prefill: PrefillWorkerState) -> HandoverState:
        prefills = (prefill, self.prefills[1]) if p == 0 else (self.prefills[0], prefill)
        return self._replace(prefills=prefills)

    def with_call(self, i: int, call: Call | None) -> HandoverState:
        """Replace call ``i``, or forget it."""
        after = () if call is None else (call,)
        return self._replace(calls=(*self.calls[:i], *after, *self.calls[i + 1 :]))

    def with_request(self, d: int, i: int, request: DecodeRequestState | None) -> HandoverState:
        """Replace request ``i`` of worker ``d``, or forget it."""
        worker = self.workers[d]
        after = () if request is None else (request,)
        requests = (*worker.requests[:i], *after, *worker.requests[i + 1 :])
        return self.with_worker(d, worker._replace(requests=requests))

    def with_link(self, d: int, link: Link) -> HandoverState:
        return self.with_worker(d, self.workers[d]._replace(link=link))

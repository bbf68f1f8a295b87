"""What must hold at every moment, and what must be left when a run has ended.

text       what a client got is a prefix of the oracle's (``SimRouter._check_text``)
pages      every page is free, cached, or held as often as it is counted
owner      a request on a decode worker has a router that wants it, or had one a moment ago
age        every attempt of a request is as old as the request
progress   the oldest sequence of the most urgent class of an engine goes on
blame      no link, worker or request is given up that no fault has touched
end        every request ends once, and nothing of it is left anywhere
"""

from __future__ import annotations

from collections import Counter

from decode_worker.request import DecodeRequest
from engine.scheduling.sequence import Phase, Sequence
from tests.simulation.faults import HARMLESS, FaultInjector
from tests.simulation.sim_router import SimRequest, SimRouter
from tests.simulation.world import SimFront, World

OWNER_S = 0.8
"""How long a worker may have a request that its router has given up: a message on its way."""

PROGRESS_S = 30.0
AFTER_S = 14.0
"""How long a fault excuses what happens after its end: avoided carriers, restarts, retries."""

AGE_S = 0.5
"""How much younger than its request an attempt may be: its messages were on their way so long. An
engine takes them at the boundary of a step, which comes on top."""

NO_DELAY = ("kill engine", "kill front", "kill router", "redis", "lapse", "break carrier", "drain")
"""Kinds of faults that hold no message up."""

NO_FAULT = ("evicted meanwhile",)
"""Failures of an attempt that no fault causes: others need what it had found in the cache."""

_COMPUTING = (Phase.WAITING, Phase.PREFILL, Phase.DECODE, Phase.WAITING_ROW)


class Invariants:
    """The checks of one run. The loop calls ``check`` after each ``EVERY`` callbacks, the patched
    methods of the product (``runner.py``) call the ``on_`` methods, and the runner the rest."""

    def __init__(
        self, world: World, routers: dict[str, SimRouter], injector: FaultInjector
    ) -> None:
        self._world = world
        self._routers = routers
        self._injector = injector
        self._oldest: dict[str, tuple[int, int, float]] = {}  # engine -> handle, progress, since
        self._unowned: dict[tuple[str, str], float] = {}  # (instance, id) -> since when

    def fail(self, text: str) -> None:
        self._world.violations.append(text)

    def check(self) -> None:
        for front in self._world.fronts.values():
            if front.process.alive:
                self._check_front(front)

    def _touched(self, *names: str, after_s: float = AFTER_S) -> int:
        """Return how many faults have touched one of these processes until lately; no name: any."""
        now = self._world.loop.now
        return sum(
            record.ended + after_s > now and (not names or bool(record.touched & set(names)))
            for record in self._injector.log
        )

    # ---- at every moment --------------------------------------------------------------------

    def _check_front(self, front: SimFront) -> None:
        engine = front.engine
        if engine is not None and engine.engine is not None:
            self._check_pages(front, engine.engine)
            if not engine.process.paused:
                self._check_progress(front, engine.engine)
            self._check_ages(front, engine.engine)
        self._check_owners(front)

    def _check_pages(self, front: SimFront, engine: object) -> None:
        manager, scheduler = engine.manager, engine.scheduler  # type: ignore[attr-defined]
        held = Counter(p for s in scheduler.sequences.values() for p in s.pages)
        counted = {page: n for page, n in enumerate(manager._refs) if n}
        if held != counted:
            self.fail(f"pages of {front.instance}: held {dict(held)}, counted {counted}")
        if len(manager._free) + len(manager._evictable) + len(counted) != manager.pages:
            self.fail(f"pages of {front.instance}: some are lost")

    def _check_progress(self, front: SimFront, engine: object) -> None:
        sequences: list[Sequence] = list(engine.scheduler.sequences.values())  # type: ignore[attr-defined]
        ready = [s for s in sequences if s.phase in _COMPUTING]
        now = self._world.loop.now
        if not ready:
            self._oldest.pop(front.instance, None)
            return
        first = min(ready, key=lambda s: s.order)
        progress = len(first.tokens) * 1000 + first.computed
        before = self._oldest.get(front.instance)
        if before is None or before[:2] != (first.handle, progress):
            self._oldest[front.instance] = first.handle, progress, now
        elif now - before[2] > PROGRESS_S and not self._touched():
            self.fail(f"{first.request.id}, the oldest of {front.instance}, stands still")

    def _check_ages(self, front: SimFront, engine: object) -> None:
        for sequence in engine.scheduler.sequences.values():  # type: ignore[attr-defined]
            first = self._first_submitted(sequence.request.id)
            exports = sequence.phase is Phase.HELD and not sequence.hold
            if first is None or exports or sequence.phase is Phase.IMPORTING:
                continue  # cached blocks alone wait in no queue
            late = sequence.order[1] - first
            excused = sum(r.ended - r.began for r in self._injector.log if r.kind not in NO_DELAY)
            if late > AGE_S + 1.1 * front.speed.most_s + excused:
                where = f"{sequence.request.id} ({sequence.phase.name}) at {front.instance}"
                self.fail(f"{where} has lost {late:.1f} s of its age")

    def _first_submitted(self, request_id: str) -> float | None:
        name = request_id.rpartition(".")[0] or request_id
        request = self._request(name)
        if request is None or request.stream is None or not request.stream.submissions:
            return None
        return request.stream.submissions[0].submitted

    def _request(self, name: str) -> SimRequest | None:
        router = self._routers.get(name.partition("-")[0])
        if router is None:
            return None
        return next((r for r in router.requests if r.name == name), None)

    def _check_owners(self, front: SimFront) -> None:
        now = self._world.loop.now
        present = {name for link in front.decode._links for name in link.requests}
        for key in [k for k in self._unowned if k[0] == front.instance and k[1] not in present]:
            del self._unowned[key]
        for name in sorted(present):
            key = front.instance, name
            if self._is_wanted(front, name):
                self._unowned.pop(key, None)
                continue
            since = self._unowned.setdefault(key, now)
            router = name.partition("-")[0]
            if now - since > OWNER_S and not self._touched(front.name, router, after_s=2.0):
                self.fail(f"{front.instance} works on {name}, which its router has given up")

    def _is_wanted(self, front: SimFront, name: str) -> bool:
        router = self._routers.get(name.partition("-")[0])
        if router is None or not router.process.alive:
            return False
        link = router.pool.links.get(front.instance)
        return link is not None and name in link._sinks

    # ---- blame ------------------------------------------------------------------------------

    def on_link_failed(self, front: SimFront, instance: str, why: str) -> None:
        """A decode worker avoids a carrier to ``instance`` from now on."""
        other = self._world.front_of(instance)
        assert other is not None
        self._world.note(f"{front.instance} avoids a carrier to {instance}: {why}")
        if not self._touched(front.name, other.name):
            self.fail(f"{front.instance} blames its link to {instance} without a fault: {why}")

    def on_suspected(self, front: SimFront, endpoint: str) -> None:
        other = next(f for f in self._world.all_fronts if f.endpoint == endpoint)
        self._world.note(f"{front.instance} suspects {other.instance}")
        if not self._touched(front.name, other.name):
            self.fail(f"{front.instance} takes {other.instance} for dead without a fault")

    def on_attempt_failed(self, front: SimFront, request: DecodeRequest, error: Exception) -> None:
        """A decode worker starts a request again, because of a worker, a link, or its own pages."""
        candidate = request._candidate
        other = None if candidate is None else self._world.front_of(candidate.instance)
        self._world.note(f"{request.request.id} at {front.instance}: {error}")
        names = (front.name,) if other is None else (front.name, other.name)
        if not self._touched(*names) and str(error) not in NO_FAULT:
            self.fail(f"{request.request.id} fails at {front.instance} without a fault: {error}")

    # ---- the end ----------------------------------------------------------------------------

    def check_outcomes(self) -> None:
        """Every request has ended once, as it may."""
        for router in self._routers.values():
            for request in router.requests:
                if len(request.outcomes) != 1:
                    self.fail(f"{request.name} has ended {len(request.outcomes)} times")
                else:
                    self._check_outcome(router, request)

    def _check_outcome(self, router: SimRouter, request: SimRequest) -> None:
        outcome = request.outcomes[0]
        if outcome in ("stop", "length"):
            if request.text != request.expected:
                self.fail(f"{request.name} ended with {request.text}, not {request.expected}")
            return
        if outcome in ("hung up", "router killed", "refused: 429"):
            return
        lasted_s, limit_s = request.ended - request.began, self._world.profile.token_timeout_s
        if outcome == "refused: 504" and lasted_s > 0.99 * limit_s and limit_s < PROGRESS_S:
            return
        refused = outcome.startswith("refused")
        deaths = sum(
            (refused or record.kind not in HARMLESS)
            and record.ended + AFTER_S > request.began
            and record.began < request.ended
            for record in self._injector.log
        )
        if deaths < (1 if refused else 3):
            self.fail(f"{request.name} failed after {deaths} faults of workers: {outcome}")

    def check_nothing_left(self) -> None:
        """All requests have ended, and some seconds have passed: nothing of them is left."""
        for front in self._living():
            self._check_front(front)
        for left in self.leftovers():
            self.fail(left)

    def leftovers(self) -> list[str]:
        """Return what is left of requests on workers and routers, in words."""
        found = [(front.instance, self._left_at_worker(front)) for front in self._living()]
        found += [
            (name, self._left_at_router(router))
            for name, router in self._routers.items()
            if router.process.alive
        ]
        return [
            f"left at {name}: { {k: v for k, v in left.items() if v} }"
            for name, left in found
            if any(left.values())
        ]

    def _living(self) -> list[SimFront]:
        return [front for front in self._world.fronts.values() if front.process.alive]

    @staticmethod
    def _left_at_worker(front: SimFront) -> dict[str, int]:
        left = {"calls": front.prefill.calls, "requests": front.decode.request_count}
        engine, session = front.engine, front.client.current
        if engine is None or engine.engine is None or engine.server is None or session is None:
            return left  # it is being replaced
        outgoing, incoming = engine.server._copies._outgoing, engine.server._copies._incoming
        shape = engine.arena.shape
        return {
            **left,
            "sequences": len(engine.engine.scheduler.sequences),
            "held pages": sum(engine.engine.manager._refs),
            "offers": outgoing.queue.transfers,
            "outbound slots": shape.outbound - len(outgoing.queue._free),
            "frames": incoming.queued,
            "inbound slots": shape.inbound - len(session.inbound),
            "listeners": len(session._listeners),
        }

    @staticmethod
    def _left_at_router(router: SimRouter) -> dict[str, int]:
        return {
            "sinks": sum(len(link._sinks) for link in router.pool.links.values()),
            "admitted": sum(router.admission.inside.values()),
            "waiting": router.dispatcher.queue.length,
            "queued": sum(q.requests for q in router.ledger.queues.values()),
            "transfers": sum(router.ledger.active.values()),
        }

"""A router's record of the work that it has sent to each worker and that is still in progress.

    PlacementTicket:  placed --first token--> receiving --second--> decoding
                        |                        |                    |
                        +------------------------+--------------------+--> released (idempotent)

    until the first token             prompt tokens and predicted seconds in the queue of P
    from there to the second          a transfer on the link P -> D, if the prefill is remote
    until the first token, or D's     KV tokens that D will need; in its reports D itself counts
    next report if that comes first   what its requests will need as used
    until a report of P names it      not subtracted from P's reports, of which the rest is the work
    (at most UNREPORTED_S)            of others; prompts of other routers count beside the reports
    until LINGER_S after the first    a prefix that P will have (``expected_prefixes.py``); from the
    token                             second token on D has it, too

A request has one ticket for each attempt; the end of the attempt releases it. The placer reads the
record for every decision, so that requests sent since a worker's last report count, too: this
router's, and those of which other routers tell it (``prefix_exchange.py``).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

from protocol.performance.speculation_profile import SpeculationProfile
from protocol.performance.step_model import StepModel
from protocol.registry.directory import WorkerRecord
from protocol.wire import wire_pb2 as pb
from router.placement.cost import beside_longer_s, queued_prompts_s
from router.placement.expected_prefixes import ExpectedPrefix, ExpectedPrefixes
from router.placement.unreported_prompts import MOST_REMEMBERED, UnreportedPrompts

K = TypeVar("K", str, tuple[str, str])

AHEAD_LEVEL = 0.5
"""Taken from the priority, in the ledger, of requests that go ahead of their class
(``router/fairness``). Workers, for which it is an integer, get an age instead."""

SHORT_LEVEL = 0.75
"""The same of short prompts, which engines compute beside all others of their class."""

REPORT_WINDOW = 3
"""Own work is subtracted from a worker's report at its maximum over this many reports: a report may
be older than what has since been answered, and own work must not look like that of other
routers."""

MOST_NAMED = MOST_REMEMBERED
"""Prompts that a load may name; it is untrusted."""

COUNT_S = 0.5
"""A worker counts its queue so often at least (``BEAT_S`` in engine/ipc/messages.py). An equal
number that comes sooner may be the same count again."""


def short_level(priority: float) -> float:
    """Return the priority, in the ledger, of a short prompt."""
    return math.ceil(priority) - SHORT_LEVEL


class DecodeLoad(NamedTuple):
    """Load of a decode worker, in which no request counts twice.

    Own work is counted exactly; the work of other routers is what the worker reports minus what of
    it was this router's at the time of the report."""

    own: int  # requests this router has in it
    reported: int  # requests it last reported, running and waiting
    own_at_report: int  # those of them that were this router's
    kv_free: int  # tokens that fit its KV pool beside those that it has promised
    kv_total: int  # 0: not reported yet
    speculation: SpeculationProfile | None = None  # None: it drafts nothing
    kv_unused: int = 0  # tokens that no sequence holds or waits for; 0: not known

    @property
    def requests(self) -> int:
        """Return the estimated number of requests in the worker."""
        return self.own + max(0, self.reported - self.own_at_report)


class QueuedPrompts(NamedTuple):
    """What a worker reports of the prompts that it has not computed yet, or not completely."""

    tokens: int  # still to be computed
    prompts: int = 0  # 0: unknown
    computed: int = 0  # tokens of the same prompts
    latest: Collection[int] | None = None  # digests of the latest ones that this counts; None: all

    @classmethod
    def of(cls, load: pb.Load | WorkerRecord) -> QueuedPrompts:
        latest = None
        if isinstance(load, pb.Load) and load.names_prompts:
            latest = tuple(load.latest_prompts[-MOST_NAMED:])
        return cls(load.queued_tokens, load.queued_prompts, load.computed_tokens, latest)


class PromptQueue:
    """Prompts that one worker still has to compute: this router's, and those of others, which it
    has reported or other routers have announced."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[float, float] = {}  # by priority; lower is computed first
        self.requests = 0
        self.gone = False  # the worker has left; the queue stays for the open tickets
        self._since = 0.0  # estimated start of the prompt in progress
        self._seen: deque[tuple[int, int]] = deque(maxlen=REPORT_WINDOW)  # own tokens, prompts
        self.tokens = 0  # of this router
        self._own_on_the_way = UnreportedPrompts(clock)
        self._announced = UnreportedPrompts(clock)  # on their way from other routers
        self._reported = 0  # tokens of other routers
        self._reported_prompts = 0  # that these are of, at least 1 where there are any
        self._counted_at = 0.0  # when they were, about

    @property
    def others(self) -> int:
        """Return the tokens of other routers that are still to be computed."""
        return self._reported + self._announced.totals()[0]

    @property
    def other_prompts(self) -> int:
        """Return the prompts that ``others`` are of."""
        return self._reported_prompts + self._announced.totals()[1]

    def announce(self, digest: int, tokens: int) -> None:
        """Count a prompt that another router has sent, until a report contains it."""
        if not self.others:
            self._counted_at = self._clock()
        self._announced.add(digest, tokens)

    def add(self, tokens: int, seconds: float, priority: float, digest: int = 0) -> None:
        if not self.requests:
            self._since = self._clock()
        if digest:
            self._own_on_the_way.add(digest, tokens)
        self.requests += 1
        self.tokens += tokens
        self._seconds[priority] = self._seconds.get(priority, 0.0) + seconds

    def remove(self, tokens: int, seconds: float, priority: float, digest: int = 0) -> None:
        self._own_on_the_way.drop(digest)
        self.requests -= 1
        self.tokens -= tokens
        self._seconds[priority] -= seconds
        self._since = self._clock()
        if not self.requests:
            self._seconds.clear()  # sums of floats leave a remainder

    def report(
        self,
        tokens: int,
        prompts: int = 0,
        computed: int = 0,
        latest: Collection[int] | None = None,
    ) -> None:
        """Record the worker's report of ``QueuedPrompts`` over all routers. This router knows the
        uncached tokens of its own prompts, but not how many of them are computed. So these are
        taken from the tokens of all prompts, computed ones included, and what remains is taken to
        be computed as far as the whole is. ``latest``: of ``QueuedPrompts``."""
        self._announced.record_report(latest)
        self._own_on_the_way.record_report(latest)
        coming, coming_prompts = self._own_on_the_way.totals()
        self._seen.append((self.tokens - coming, self.requests - coming_prompts))
        whole, now = tokens + computed, self._clock()
        others = max(0, whole - max(own for own, _ in self._seen)) * tokens // max(1, whole)
        if others != self._reported or now - self._counted_at >= COUNT_S:
            self._reported, self._counted_at = others, now
        own_prompts = max(own for _, own in self._seen)
        self._reported_prompts = max(1, prompts - own_prompts) if others else 0

    def forget_others(self) -> None:
        self._reported = self._reported_prompts = 0
        self._announced.clear()

    def beside(self, prefix: ExpectedPrefix | None) -> QueuedPrompts:
        """Return the prompts of all routers, less the one that computes ``prefix``."""
        tokens, prompts = self.tokens + self.others, self.requests + self.other_prompts
        if prefix is None:
            return QueuedPrompts(tokens, prompts)
        if prefix.of_other:  # it may not be in the worker's report yet
            known = min(prefix.tokens, self.others)
            return QueuedPrompts(tokens - known, prompts - min(1, self.other_prompts))
        return QueuedPrompts(tokens - prefix.tokens, prompts - 1)

    def seconds(self, priority: float, others_s: float = 0.0, step_s: float = 0.0) -> float:
        """Return the predicted seconds of work ahead of a request of this priority. ``others_s``:
        what ``others`` takes by itself.

        The worker computes one prompt at a time, and is taken to have done the larger of two
        amounts: an own prompt in proportion to its time, all but its end if it takes longer; and
        what is done since the others were counted, a step of ``step_s`` at most, because the worker
        reports the tokens that are left after each step.
        """
        ahead = everything = 0.0
        for level, seconds in self._seconds.items():
            everything += seconds
            if level <= priority:
                ahead += seconds
        done_s = 0.0
        if others_s:
            done_s = min(step_s, others_s, self._clock() - self._counted_at)
        if self.requests:
            done_s = max(done_s, min(everything / self.requests, self._clock() - self._since))
        return max(0.0, ahead + others_s - done_s)


def queue_times(
    queue: PromptQueue, model: StepModel, chunk: int, level: float, *, is_short: bool = False
) -> tuple[float, float]:
    """Return ``queue_s`` and ``beside_s`` of the worker's ``PrefillState``."""
    others_s, step_s = 0.0, model.prefill_s(0, chunk, chunk)
    if queue.others:
        others_s = queued_prompts_s(model, queue.others, queue.other_prompts, chunk)
    queue_s = queue.seconds(level, others_s, step_s)
    if not is_short:
        return queue_s, 0.0
    short_s = queue.seconds(short_level(level))
    return short_s, beside_longer_s(queue_s, short_s, step_s)


class WorkLedger:
    """Own work by worker. Nothing is kept of a worker that has left once its tickets are
    released."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.on_less_work: Callable[[], None] = lambda: None  # own work ended: there may be room
        self.on_report: Callable[[], None] = lambda: None  # of a worker, of any load
        self._clock = clock
        self.queues: dict[str, PromptQueue] = {}
        self.pending_kv: Counter[str] = Counter()  # tokens that D will need, and not yet reports
        # The tickets of these by D, oldest first.
        self._unreported: dict[str, dict[PlacementTicket, None]] = {}
        self.active: Counter[tuple[str, str]] = Counter()  # transfers in flight, by (P, D)
        self.expected = ExpectedPrefixes(clock)

    def report(
        self,
        instance: str,
        tokens: int,
        prompts: int = 0,
        computed: int = 0,
        latest: Collection[int] | None = None,
        *,
        unseen: int = 0,
    ) -> None:
        """Record a worker's report of its ``QueuedPrompts``. ``unseen``: latest attempts at this
        decode worker that the report does not contain."""
        queue = self.queue(instance)
        queue.gone = False
        queue.report(tokens, prompts, computed, latest)
        tickets = list(self._unreported.get(instance, ()))
        for ticket in tickets[: max(0, len(tickets) - unseen)]:
            self._drop_unreported(ticket, instance, ticket.kv_tokens)
        self.on_report()

    def announce(self, instance: str, digest: int, tokens: int) -> None:
        """Record that another router has sent a worker a prompt with ``tokens`` to compute. One
        that has never reported is unknown here, and no placement looks at it."""
        queue = self.queues.get(instance)
        if queue is not None and not queue.gone:
            queue.announce(digest, tokens)

    def forget(self, instance: str) -> None:
        """Drop the report of a worker that has left; open tickets still release their own part."""
        if instance in self.queues:
            self.queues[instance].gone = True
            self.queues[instance].forget_others()
            self._drop_if_gone(instance)

    @property
    def prompts(self) -> int:
        """Return the number of requests whose prompts are not computed yet."""
        return sum(queue.requests for queue in self.queues.values())

    def queue(self, instance: str) -> PromptQueue:
        """Return the worker's queue, created if there is none."""
        found = self.queues.get(instance)
        if found is None:
            found = self.queues[instance] = PromptQueue(self._clock)
        return found

    def _drop_if_gone(self, instance: str) -> None:
        queue = self.queues[instance]
        if queue.gone and not queue.requests:
            del self.queues[instance]

    def _drop_unreported(self, ticket: PlacementTicket, decode: str, kv_tokens: int) -> None:
        """Count the KV of a ticket no more, unless a report has done so."""
        tickets = self._unreported.get(decode, {})
        if ticket in tickets:
            del tickets[ticket]
            _subtract(self.pending_kv, decode, kv_tokens)
        if not tickets:
            self._unreported.pop(decode, None)

    def open(
        self,
        prefill: str | None,
        decode: str,
        *,
        tokens: int,
        seconds: float,
        kv_tokens: int,
        priority: float,
        keys: Sequence[bytes] = (),
        digest: int = 0,
    ) -> PlacementTicket:
        """Record an attempt: ``tokens`` to compute in predicted ``seconds`` at P (None: at D), and
        ``kv_tokens`` to store at D. ``keys``: block keys of the prompt, which later requests may
        share. ``digest``: of its id, by which the worker will report it; 0: it will not. The caller
        releases the ticket."""
        queued = (tokens, seconds, priority, digest)
        return PlacementTicket(self, prefill, decode, queued, kv_tokens, keys)


class PlacementTicket:
    """The work of one attempt. Every method may be called at any time, also after ``release``."""

    def __init__(
        self,
        ledger: WorkLedger,
        prefill: str | None,
        decode: str,
        queued: tuple[int, float, float, int],  # tokens, seconds, priority in the queue, digest
        kv_tokens: int,
        keys: Sequence[bytes],
    ) -> None:
        self._ledger = ledger
        self._computing = decode if prefill is None else prefill
        self._decode = decode
        self._link = None if prefill is None else (prefill, decode)
        self._queued = queued
        self._keys = keys
        self.prefix = ledger.expected.add(self._computing, keys, queued[0], queued[2])
        self.kv_tokens = kv_tokens
        self._phase = "placed"
        ledger.queue(self._computing).add(*self._queued)
        ledger.pending_kv[decode] += kv_tokens
        ledger._unreported.setdefault(decode, {})[self] = None

    def on_tokens(self) -> None:
        """Advance: at the first tokens the prompt is computed, at the second its KV is at D."""
        expected = self._ledger.expected
        if self._phase == "placed":
            self._leave_queue()
            expected.on_computed(self.prefix)
            self._phase = "decoding"
            if self._link is not None:
                self._ledger.active[self._link] += 1
                self._phase = "receiving"
        elif self._phase == "receiving":
            self._leave_link()
            tokens, _, level, _ = self._queued
            expected.on_computed(expected.add(self._decode, self._keys, tokens, level))
            self._phase = "decoding"

    def release(self) -> None:
        if self._phase == "placed":
            self._leave_queue()
        elif self._phase == "receiving":
            self._leave_link()
        self._ledger.expected.drop(self.prefix)
        self._phase = "released"
        self._ledger.on_less_work()  # D has a row and pages less in use

    def _leave_queue(self) -> None:
        ledger = self._ledger
        ledger.queues[self._computing].remove(*self._queued)
        ledger._drop_if_gone(self._computing)
        ledger._drop_unreported(self, self._decode, self.kv_tokens)
        ledger.on_less_work()

    def _leave_link(self) -> None:
        assert self._link is not None
        _subtract(self._ledger.active, self._link, 1)


def _subtract(counter: Counter[K], key: K, count: int) -> None:
    counter[key] -= count
    if not counter[key]:
        del counter[key]

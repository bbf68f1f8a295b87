"""What this router has under way, by worker: counted when it is sent, forgotten exactly once.

    Ticket:  placed --first token--> receiving --second--> decoding
                |                        |                    |
                +------------------------+--------------------+--> released (once, however often)

    until the first token      prompt tokens and predicted seconds in the queue of who computes it
    from there to the second   a transfer on the link P -> D, where there is one
    until released             a request at D

Every request has one ticket for each attempt; whatever ends the attempt releases it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

K = TypeVar("K", str, tuple[str, str])

REPORTS = 3
"""Own work is taken out of a worker's report at its highest of so many reports: a report may be
older than what has since been answered, and own work must not look like somebody else's."""


class Queue:
    """Prompts that one worker is to compute: our own, and what it reports of others'."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[int, float] = {}  # by priority; lower is computed earlier
        self.requests = 0
        self.gone = False  # the worker is; the queue stays for the tickets that are open
        self._since = 0.0  # when the one under way began, as far as can be told
        self._seen: deque[int] = deque(maxlen=REPORTS)
        self.tokens = 0  # own
        self.others = 0  # tokens

    def add(self, tokens: int, seconds: float, priority: int) -> None:
        if not self.requests:
            self._since = self._clock()
        self.requests += 1
        self.tokens += tokens
        self._seconds[priority] = self._seconds.get(priority, 0.0) + seconds

    def remove(self, tokens: int, seconds: float, priority: int) -> None:
        self.requests -= 1
        self.tokens -= tokens
        self._seconds[priority] -= seconds
        self._since = self._clock()
        if not self.requests:
            self._seconds.clear()  # sums of floats leave a remainder

    def report(self, tokens: int) -> None:
        """The worker says that so many tokens are queued, everybody's."""
        self._seen.append(self.tokens)
        self.others = max(0, tokens - max(self._seen))

    def seconds(self, priority: int) -> float:
        """Predicted time of own work that goes before a request of this priority. The one under
        way is taken to be as far as its time; when it takes longer, it is about to end."""
        if not self.requests:
            return 0.0
        ahead = everything = 0.0
        for level, seconds in self._seconds.items():
            everything += seconds
            if level <= priority:
                ahead += seconds
        under_way = min(everything / self.requests, self._clock() - self._since)
        return max(0.0, ahead - under_way)


class Ledger:
    """Own work by worker. Nothing is kept of a worker that is gone and has nothing under way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.queues: dict[str, Queue] = {}
        self.pending_kv: Counter[str] = Counter()  # tokens due at D before their first token
        self.active: Counter[tuple[str, str]] = Counter()  # transfers under way, by (P, D)

    def report(self, instance: str, queued_tokens: int) -> None:
        """A worker's own word."""
        queue = self.queue(instance)
        queue.gone = False
        queue.report(queued_tokens)

    def forget(self, instance: str) -> None:
        """The worker is gone: what it reported goes; tickets still release what is theirs."""
        if instance in self.queues:
            self.queues[instance].gone = True
            self.queues[instance].others = 0
            self._drop_if_gone(instance)

    @property
    def prompts(self) -> int:
        """Requests whose prompts are to be computed."""
        return sum(queue.requests for queue in self.queues.values())

    def queue(self, instance: str) -> Queue:
        """To add to."""
        found = self.queues.get(instance)
        if found is None:
            found = self.queues[instance] = Queue(self._clock)
        return found

    def _drop_if_gone(self, instance: str) -> None:
        queue = self.queues[instance]
        if queue.gone and not queue.requests:
            del self.queues[instance]

    def open(
        self,
        prefill: str | None,
        decode: str,
        *,
        tokens: int,
        seconds: float,
        kv_tokens: int,
        priority: int,
    ) -> Ticket:
        """Count an attempt: ``tokens`` to compute in predicted ``seconds`` at P (None: at D), room
        for ``kv_tokens`` at D."""
        return Ticket(self, prefill, decode, tokens, seconds, kv_tokens, priority)


class Ticket:
    """One attempt's work. Owned by the request; every method may be called at any time."""

    def __init__(
        self,
        ledger: Ledger,
        prefill: str | None,
        decode: str,
        tokens: int,
        seconds: float,
        kv_tokens: int,
        priority: int,
    ) -> None:
        self._ledger = ledger
        self._computing = decode if prefill is None else prefill
        self._decode = decode
        self._link = None if prefill is None else (prefill, decode)
        self._queued = (tokens, seconds, priority)
        self._kv_tokens = kv_tokens
        self._phase = "placed"
        ledger.queue(self._computing).add(*self._queued)
        ledger.pending_kv[decode] += kv_tokens

    def tokens_came(self) -> None:
        """The first time the prompt is computed, the second time its KV is at D."""
        if self._phase == "placed":
            self._leave_queue()
            self._phase = "decoding"
            if self._link is not None:
                self._ledger.active[self._link] += 1
                self._phase = "receiving"
        elif self._phase == "receiving":
            self._leave_link()
            self._phase = "decoding"

    def release(self) -> None:
        if self._phase == "placed":
            self._leave_queue()
        elif self._phase == "receiving":
            self._leave_link()
        self._phase = "released"

    def _leave_queue(self) -> None:
        ledger = self._ledger
        ledger.queues[self._computing].remove(*self._queued)
        ledger._drop_if_gone(self._computing)
        _subtract(ledger.pending_kv, self._decode, self._kv_tokens)

    def _leave_link(self) -> None:
        assert self._link is not None
        _subtract(self._ledger.active, self._link, 1)


def _subtract(counter: Counter[K], key: K, count: int) -> None:
    counter[key] -= count
    if not counter[key]:
        del counter[key]


# MERGED router.load
# The load of a decode worker, so that nothing counts twice.
#
# Own work is counted exactly; what other routers have in a worker is what it reports minus what of
# it was our own when it reported.


class DecodeLoad(NamedTuple):
    own: int  # requests this router has in it
    reported: int  # requests it last reported, running and waiting
    own_at_report: int  # those of them that were this router's
    kv_free: int  # tokens its pool can take
    kv_total: int  # 0: it has not said yet
    pace: float = 1.0  # tokens that a sequence gets in the time of a plain step

    @property
    def requests(self) -> int:
        """In the worker, as well as this router can tell."""
        return self.own + max(0, self.reported - self.own_at_report)

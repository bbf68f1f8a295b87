"""Prefixes on their way: what workers compute and do not report as cached yet.

    add --> computing --on_computed--> cached --LINGER_S--> forgotten, or known by a sibling
                |
                +--drop (the request has ended before its first token)--> likewise
    add_of_other --> computing --its time is over--> forgotten

A worker's cache events reach a router up to a second after the prompt has been computed. Until then
the prefix index does not know the prefix, and siblings, such as the choices of one request or the
agents that a client starts at once, would be computed again on as many workers as there are. An
engine lets a request wait for a prefix that another one is computing
(``engine/scheduling/scheduler.py``), so a sibling on the same worker computes only what follows.

``WorkLedger`` owns the prefixes of its tickets, and the placer looks prompts up in them. Every
``SAMPLE_BLOCKS``-th key of a prompt leads to it, so that one of 128k tokens takes 512 entries; the
exact length is found by comparing the keys themselves, which the request keeps anyway. What other
routers have sent is here too (``prefix_exchange.py``).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

SAMPLE_BLOCKS = 8
"""Distance of the keys by which a prompt is found: 256 tokens."""

LINGER_S = 2.0
"""From a first token until the events of its worker have come: twice their usual delay at most."""

FACTOR = 2.0
"""Times the predicted seconds until a prompt is computed, for which other routers remember it."""
MOST_S = 30.0
"""For which they remember it at most."""

MOST_SIBLINGS = 4
"""Further prompts of one prefix at one worker that are remembered: one of them takes the place of
the first, should that end early."""

MAX_SAMPLES = 1 << 18
"""Entries of one router, about 300 bytes each; further prefixes are not remembered."""


def remembered_s(seconds: float) -> float:
    """Return for how long other routers remember a prompt that is computed in about ``seconds``."""
    return min(FACTOR * seconds + LINGER_S, MOST_S)


class ExpectedPrefix:
    """The prompt of one request at one worker. Created by ``ExpectedPrefixes``."""

    __slots__ = (
        *("computed", "first", "instance", "is_new", "keys", "level", "of_other", "sampled"),
        "tokens",
    )

    def __init__(
        self, instance: str, keys: Sequence[bytes], tokens: int, level: float, first: int
    ) -> None:
        self.instance = instance
        self.keys = keys  # of its blocks from ``first`` on
        self.first = first
        self.tokens = tokens  # that the worker has to compute for it
        self.level = level  # priority in the ledger
        self.computed = False
        self.of_other = False  # a router's hint
        self.is_new = False  # some of it was on its way by no other prompt when it was added
        self.sampled: list[bytes] = []  # keys that lead to it, or will when siblings have ended


class ExpectedPrefixes:
    """The prefixes of one router. Where several requests bring the same prefix to one worker, its
    keys lead to the first one, because it is the one that is computed; to the next one when the
    first is forgotten; and to one that is computed before the first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_key: dict[bytes, dict[str, ExpectedPrefix]] = {}
        # By key and worker: further prompts of this router with the same prefix, oldest first.
        self._siblings: dict[tuple[bytes, str], OrderedDict[ExpectedPrefix, None]] = {}
        self._expiring: list[tuple[float, int, ExpectedPrefix]] = []  # a heap
        self._numbers = itertools.count()
        self._samples = 0

    def add(
        self, instance: str, keys: Sequence[bytes], tokens: int, level: float
    ) -> ExpectedPrefix:
        """Remember that the worker will compute a prompt with these block keys."""
        return self._add(ExpectedPrefix(instance, keys, tokens, level, 0))

    def add_of_other(
        self,
        instance: str,
        keys: Sequence[bytes],
        tokens: int,
        level: float,
        first: int,
        seconds: float,
    ) -> None:
        """Remember for ``seconds`` that the worker will compute a prompt for another router;
        ``keys``: of its blocks from ``first`` on."""
        prefix = ExpectedPrefix(instance, keys, tokens, level, first)
        prefix.of_other = True
        self._add(prefix)
        if prefix.sampled:
            self._forget_after(prefix, seconds)

    def _add(self, prefix: ExpectedPrefix) -> ExpectedPrefix:
        self._expire()
        instance, keys = prefix.instance, prefix.keys
        for key in keys[-prefix.first % SAMPLE_BLOCKS :: SAMPLE_BLOCKS]:
            if self._samples + len(prefix.sampled) >= MAX_SAMPLES:
                break
            holders = self._by_key.setdefault(key, {})
            known = holders.get(instance)
            if known is not None and prefix.of_other:
                continue
            if known is not None and not known.of_other:
                siblings = self._siblings.setdefault((key, instance), OrderedDict())
                if len(siblings) >= MOST_SIBLINGS:
                    continue
                siblings[prefix] = None
            else:
                if known is not None:  # what this router knows takes the place of a hint
                    known.sampled.remove(key)
                    self._samples -= 1
                holders[instance] = prefix
                prefix.is_new = True
            prefix.sampled.append(key)
        self._samples += len(prefix.sampled)
        return prefix

    def on_computed(self, prefix: ExpectedPrefix) -> None:
        """The first token has come: the prefix is in the cache, and events will say so."""
        if prefix.sampled and not prefix.computed:
            prefix.computed = True
            self._put_before_uncomputed(prefix)
            self._forget_after(prefix, LINGER_S)

    def _put_before_uncomputed(self, prefix: ExpectedPrefix) -> None:
        """Let the prefix's keys lead to it where they lead to a sibling that is not computed, and
        to it next where they lead to one that is."""
        instance = prefix.instance
        for key in prefix.sampled:
            known = self._by_key[key][instance]
            if known is prefix:
                continue
            siblings = self._siblings[key, instance]
            siblings.move_to_end(prefix, last=False)
            if not known.computed:
                del siblings[prefix]
                siblings[known] = None
                siblings.move_to_end(known, last=False)
                self._by_key[key][instance] = prefix

    def drop(self, prefix: ExpectedPrefix) -> None:
        """Forget a prefix that has not been computed; one that has been is kept until it
        expires."""
        if not prefix.computed:
            self._forget(prefix)

    def match(self, keys: Sequence[bytes]) -> dict[str, tuple[int, ExpectedPrefix]]:
        """Return for each worker how many leading ``keys`` are on their way, and by which
        prompt."""
        found: dict[str, tuple[int, ExpectedPrefix]] = {}
        if not self._by_key:
            return found
        self._expire()
        last = (len(keys) - 1) // SAMPLE_BLOCKS * SAMPLE_BLOCKS
        for at in range(last, -1, -SAMPLE_BLOCKS):  # the longest match of each worker comes first
            for instance, prefix in self._by_key.get(keys[at], {}).items():
                if instance not in found and at >= prefix.first:  # another router may say anything
                    found[instance] = at + _common(keys, prefix, at), prefix
        return found

    def __len__(self) -> int:
        """Return the number of entries."""
        return self._samples

    def _forget_after(self, prefix: ExpectedPrefix, seconds: float) -> None:
        heapq.heappush(self._expiring, (self._clock() + seconds, next(self._numbers), prefix))

    def _expire(self) -> None:
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            self._forget(heapq.heappop(self._expiring)[2])

    def _forget(self, prefix: ExpectedPrefix) -> None:
        self._samples -= len(prefix.sampled)
        instance = prefix.instance
        for key in prefix.sampled:
            holders, siblings = self._by_key[key], self._siblings.get((key, instance))
            if siblings is None:
                del holders[instance]
                if not holders:
                    del self._by_key[key]
                continue
            if holders[instance] is prefix:
                holders[instance], _ = siblings.popitem(last=False)
            else:
                del siblings[prefix]
            if not siblings:
                del self._siblings[key, instance]
        prefix.sampled = []


def _common(keys: Sequence[bytes], prefix: ExpectedPrefix, start: int) -> int:
    """Return how many keys from ``start`` on are equal, up to the next one that was sampled."""
    others, first = prefix.keys, prefix.first
    at, end = start, min(start + SAMPLE_BLOCKS, len(keys), first + len(others))
    while at < end and keys[at] == others[at - first]:
        at += 1
    return at - start


class PromptPrefixes(NamedTuple):
    """The prefixes of one prompt in blocks, by instance."""

    cached: dict[str, int]
    coming: dict[str, tuple[int, ExpectedPrefix]]  # more than cached, once it has been computed


def find_prefixes(
    cached: dict[str, int], expected: ExpectedPrefixes, keys: Sequence[bytes], level: float
) -> PromptPrefixes:
    """Add to the ``cached`` prefixes of a prompt what is expected. A worker computes a more urgent
    request before the prompt that shares its prefix, unless it has begun with that one, which a
    router does not know."""
    found = PromptPrefixes(cached, {})
    for instance, (blocks, prefix) in expected.match(keys).items():
        if blocks <= cached.get(instance, 0):
            continue
        if prefix.computed:
            cached[instance] = blocks
        elif math.ceil(prefix.level) <= math.ceil(level):
            found.coming[instance] = blocks, prefix
    return found

"""What the router keeps of each worker follows who is there."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.directory import WorkerRecord
from router.follow import Follower
from router.index import PrefixIndex
from router.learned import Learned
from router.ledger import Ledger


class Watch:
    """The Pool's Watcher. ``follower``: None where there is no Redis to read cache events from."""

    def __init__(
        self, index: PrefixIndex, ledger: Ledger, learned: Learned, follower: Follower | None
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._learned = learned
        self._follower = follower
        self._known: set[str] = set()

    def on_workers(self, records: Sequence[WorkerRecord]) -> None:
        known = {record.instance for record in records}
        for gone in self._known - known:
            self._index.remove(gone)
            self._ledger.forget(gone)
        if known != self._known:
            self._learned.keep(known)
            if self._follower is not None:
                self._follower.follow(known)
        self._known = known

    def on_load(self, instance: str, queued_tokens: int) -> None:
        self._ledger.report(instance, queued_tokens)

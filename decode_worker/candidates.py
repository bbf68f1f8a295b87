"""Chooses which prefill worker is asked next to compute the prompt of one request."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from protocol.errors import PeerLost, PeerRefused, TransferFailed
from protocol.wire import wire_pb2 as pb

MAX_TRANSFERS = 3
"""Handovers that may fail, for any reason, before the prompt is prefilled here."""


class PrefillCandidates:
    """The prefill workers that the router named for one request, best first.

    After a failed handover the same worker is asked again while it lives, because it has the prompt
    cached: the failure was one of the link, or this worker had no pages. A worker that died or
    refuses is struck off. ``DecodeRequest`` has one."""

    def __init__(self, named: Iterable[pb.PrefillCandidate]) -> None:
        self._able = list(named)[:MAX_TRANSFERS]
        self._failures = 0

    def choose(
        self, is_usable: Callable[[pb.PrefillCandidate], bool]
    ) -> pb.PrefillCandidate | None:
        """Return the worker to ask; None: the prompt is prefilled here. Workers that are suspected
        to be dead, or that no link leads to, are passed over (``is_usable``)."""
        if self._failures >= MAX_TRANSFERS:
            return None
        return next((c for c in self._able if is_usable(c)), None)

    def failed(self, candidate: pb.PrefillCandidate | None, error: TransferFailed) -> None:
        """Count a failed handover from ``candidate`` (None: it was prefilled here)."""
        self._failures += 1
        if isinstance(error, (PeerLost, PeerRefused)) and candidate in self._able:
            self._able.remove(candidate)

"""Which carriers a worker uses to which other workers, and what it knows about each such link.

    usable --CarrierFailed--> avoided for AVOID_S --> one transfer probes --arrived--> usable
                                ^                            |
                                +-------CarrierFailed--------+

``LinkTable`` belongs to the receiving worker, which offers carriers; the record of the worker and
its metrics read it. Event loop only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

AVOID_S = 30.0
"""How long a carrier that failed is not offered to the same worker again."""

PROBE_S = 10.0
"""How long the transfer that probes a carrier keeps others from it, at most."""

FORGET_S = 600.0
"""A link that was not used for so long is forgotten: workers that restart have other instances."""

RATES = 8
"""Number of recent transfers whose best rate is that of the link."""

DEFAULT_BYTES_S = {"local": 5e9, "nixl": 10e9, "nccl": 10e9, "tcp": 2e9, "grpc": 1e9}
"""Bytes per second that are expected of a carrier until it was measured and no setting declares the
bandwidth: what each moves on one machine."""

NETWORK_CARRIERS = ("tcp", "grpc")
"""Carriers whose bandwidth is that of the declared link."""


@dataclass
class LinkState:
    """What is known about one carrier to one worker."""

    transfers: int = 0
    failures: int = 0
    why: str = ""  # of the last failure
    avoided_until: float = 0.0
    probed_until: float = 0.0
    used_at: float = 0.0
    broken: bool = False  # the last transfer failed
    absent: bool = False  # the other worker does not have it, or not for this one
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATES))  # of waits
    carried: deque[float] = field(default_factory=lambda: deque(maxlen=RATES))  # of payloads


@dataclass(frozen=True)
class LinkRow:
    """One link as the metrics and the record of the worker show it."""

    instance: str  # of the sending worker
    carrier: str
    transfers: int
    failures: int
    bytes_s: float  # measured; 0: unknown
    avoided_s: float  # for so many seconds more; 0: it is in use
    chosen: bool  # by the last transfer from this worker
    reason: str  # why it was chosen, or what failed last


class LinkTable:
    """The links of one worker to all workers that it receives KV from. ``KVReceiver`` has one."""

    def __init__(
        self,
        carriers: Sequence[str],
        declared_bytes_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``carriers``: names, best first. ``declared_bytes_s``: of the network; 0: unknown."""
        self._carriers = tuple(carriers)
        self._declared = declared_bytes_s
        self._clock = clock
        self._links: dict[tuple[str, str], LinkState] = {}
        self._chosen: dict[str, tuple[str, str]] = {}  # instance -> carrier and reason

    # ---- the choice -------------------------------------------------------------------------

    def usable(self, instance: str) -> bool:
        """Return whether there is a carrier to this worker that is not avoided now."""
        return any(
            self._is_usable(instance, name) and not self._is_absent(instance, name)
            for name in self._carriers
        )

    def offers(self, instance: str) -> list[str]:
        """Return the carriers to offer to this worker, best first; those that were avoided long
        enough are offered to one transfer at a time. The last carrier is always among them, because
        every worker has it."""
        self._forget()
        *others, last = self._carriers
        names = [*(name for name in others if self._is_usable(instance, name)), last]
        for name in names:
            link = self._links.get((instance, name))
            if link is not None and link.broken and self._is_usable(instance, name):
                link.probed_until = self._clock() + PROBE_S
        return names

    def choose(self, instance: str, carrier: str, offered: Sequence[str]) -> None:
        """Record that the other worker has taken ``carrier`` of those that were offered."""
        reasons = []
        for name in self._carriers[: self._carriers.index(carrier)]:
            link = self._links.get((instance, name))
            if name in offered:
                self._link(instance, name).absent = True
                reasons.append(f"{name}: not available")
            elif link is not None and link.broken:
                reasons.append(f"{name} avoided: {link.why}")
            else:
                reasons.append(f"{name}: not offered")
        self._chosen[instance] = (carrier, "; ".join(reasons) or "best")
        for name in offered:
            if name != carrier and (link := self._links.get((instance, name))) is not None:
                link.probed_until = 0.0  # the probe is left to the next transfer
        link = self._link(instance, carrier)
        link.transfers, link.absent = link.transfers + 1, False

    # ---- what transfers report --------------------------------------------------------------

    def failed(self, instance: str, carrier: str, why: str) -> None:
        """Avoid the carrier to this worker for AVOID_S."""
        link = self._link(instance, carrier)
        link.failures += 1
        link.broken, link.why = True, why
        link.avoided_until, link.probed_until = self._clock() + AVOID_S, 0.0

    def succeeded(self, instance: str, carrier: str) -> None:
        """Record that a transfer is complete."""
        link = self._link(instance, carrier)
        link.broken, link.avoided_until, link.probed_until = False, 0.0, 0.0

    def measured(self, instance: str, carrier: str, bytes_s: float) -> None:
        """Record how fast a link has carried the tail of a transfer."""
        self._link(instance, carrier).rates.append(bytes_s)

    def carried(self, instance: str, carrier: str, bytes_s: float) -> None:
        """Record how fast the payloads of a transfer came, without the time between frames."""
        self._link(instance, carrier).carried.append(bytes_s)

    # ---- what is known ----------------------------------------------------------------------

    def known_bytes_s(self, instance: str, carrier: str) -> float | None:
        """Return the rate at which requests get KV by this link, copies at both ends included, or
        the declared rate; None if neither is known."""
        link = self._links.get((instance, carrier))
        measured = max(link.rates, default=None) if link is not None else None
        declared = self._declared if carrier in NETWORK_CARRIERS and self._declared else None
        return measured if measured is not None else declared

    def expected_bytes_s(self, instance: str, carrier: str) -> float:
        """Return the rate of the link alone, or what is expected of its carrier.

        Where payloads are timed, or memory is the link, the waits of requests do not count: they
        contain the copies, and small frames that are chosen for them would make them longer."""
        link = self._links.get((instance, carrier))
        if link is not None and link.carried:
            return max(link.carried)
        known = None if carrier in ("local", "tcp") else self.known_bytes_s(instance, carrier)
        declared = self._declared if carrier in NETWORK_CARRIERS else 0.0
        return known or declared or DEFAULT_BYTES_S.get(carrier, 1e9)

    def rows(self) -> list[LinkRow]:
        """Return every link, in order of worker and carrier."""
        self._forget()
        return [self._row(*key) for key in sorted(self._links) if not self._is_absent(*key)]

    def _row(self, instance: str, carrier: str) -> LinkRow:
        link = self._links[instance, carrier]
        chosen, reason = self._chosen.get(instance, ("", ""))
        return LinkRow(
            instance=instance,
            carrier=carrier,
            transfers=link.transfers,
            failures=link.failures,
            bytes_s=max(link.rates, default=0.0),
            avoided_s=max(0.0, link.avoided_until - self._clock()),
            chosen=chosen == carrier,
            reason=reason if chosen == carrier else link.why,
        )

    def _is_usable(self, instance: str, carrier: str) -> bool:
        link = self._links.get((instance, carrier))
        return link is None or self._clock() >= max(link.avoided_until, link.probed_until)

    def _is_absent(self, instance: str, carrier: str) -> bool:
        link = self._links.get((instance, carrier))
        return link is not None and link.absent

    def _link(self, instance: str, carrier: str) -> LinkState:
        link = self._links.setdefault((instance, carrier), LinkState())
        link.used_at = self._clock()
        return link

    def _forget(self) -> None:
        now = self._clock()
        self._links = {k: link for k, link in self._links.items() if now - link.used_at < FORGET_S}
        known = {instance for instance, _ in self._links}
        self._chosen = {i: chosen for i, chosen in self._chosen.items() if i in known}

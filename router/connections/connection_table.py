"""``ConnectionTable``: the open connections of one router, their limits, and which one gives way.

    admit --room, or an idle one was closed--> idle --request--> busy --last response--> idle
      +--all are busy: refused                  +--> closed <------+

A connection is idle while it has no unfinished request: before its first one, while a head is
still incomplete, and between two requests. Where a limit is reached, the connection that has been
idle longest is closed for the new one, so that idle connections never shut out a client with a
request. ``Acceptor`` admits connections; ``LimitedHttpProtocol`` reports what they do.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Refusal: TypeAlias = Literal["all", "address", "descriptors"]
"""Which limit a refused connection met: that of the router, of its address, or of the process."""

_ADDRESS_SHARE = 0.75
_IPV6_PREFIX = 64  # bits of an IPv6 address that one site is given


@dataclass(frozen=True)
class ConnectionLimits:
    """Most connections in all and from one address. Made by ``connection_limits``."""

    total: int
    per_address: int
    per_loopback: int  # from an address of this machine: a proxy, or every client there is


def connection_limits(total: int, per_address: int | None) -> ConnectionLimits:
    """Return the limits of a router that takes ``total`` connections.

    Without ``per_address`` one address may take three quarters of them, so that the others are
    never shut out; on loopback all, because there every client has the same address.
    """
    if per_address is not None:
        return ConnectionLimits(total, per_address, per_address)
    return ConnectionLimits(total, max(1, int(total * _ADDRESS_SHARE)), total)


def address_group(host: str) -> str:
    """Return what is counted as one address: an IPv4 address, or the /64 of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address) or address.is_loopback:
        return str(address)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))


class ConnectionSlot:
    """The place of one open connection. Created by ``ConnectionTable.admit``.

    ``evict`` closes the connection at once; the present owner of the connection sets it.
    """

    def __init__(self, table: ConnectionTable, address: str) -> None:
        self._table = table
        self.address = address
        self.evict: Callable[[], object] = lambda: None

    def mark_busy(self) -> None:
        """A request has begun: the connection does not give way until it is idle again."""
        self._table.mark_busy(self)

    def mark_idle(self) -> None:
        """All requests of the connection have ended."""
        self._table.mark_idle(self)

    def release(self) -> None:
        """The connection is closed. Idempotent."""
        self._table.release(self)


@dataclass
class _AddressEntry:
    slots: set[ConnectionSlot] = field(default_factory=set)
    idle: dict[ConnectionSlot, None] = field(default_factory=dict)  # the longest idle one first


class ConnectionTable:
    """The connections of one router. Created by ``RouterServer``; every step takes O(1)."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.refused: Counter[Refusal] = Counter()
        self.evicted = 0
        self._open = 0
        self._idle: dict[ConnectionSlot, None] = {}  # of all addresses, the longest idle one first
        self._addresses: dict[str, _AddressEntry] = {}  # only those with an open connection

    @property
    def open(self) -> int:
        return self._open

    @property
    def idle(self) -> int:
        return len(self._idle)

    def admit(self, host: str) -> ConnectionSlot | None:
        """Return the slot of a new connection from ``host``, or None where it is refused."""
        address = address_group(host)
        entry = self._addresses.get(address)
        is_full = self._open >= self.limits.total
        if entry is not None and len(entry.slots) >= self._most_of(address):
            has_room = self._evict(entry.idle)
        else:
            has_room = not is_full or self._evict(self._idle)
        if not has_room:
            self.refused["all" if is_full else "address"] += 1
            return None
        slot = ConnectionSlot(self, address)
        entry = self._addresses.setdefault(address, _AddressEntry())
        entry.slots.add(slot)
        self._open += 1
        self.mark_idle(slot)
        return slot

    def evict_idle(self) -> bool:
        """Close the connection that has been idle longest; return whether there was one."""
        return self._evict(self._idle)

    def mark_busy(self, slot: ConnectionSlot) -> None:
        self._idle.pop(slot, None)
        entry = self._addresses.get(slot.address)
        if entry is not None:
            entry.idle.pop(slot, None)

    def mark_idle(self, slot: ConnectionSlot) -> None:
        entry = self._addresses.get(slot.address)
        if entry is not None and slot in entry.slots:  # else it is closed already
            self.mark_busy(slot)  # so that it becomes the last one
            self._idle[slot] = entry.idle[slot] = None

    def release(self, slot: ConnectionSlot) -> None:
        entry = self._addresses.get(slot.address)
        if entry is None or slot not in entry.slots:
            return
        self.mark_busy(slot)
        entry.slots.discard(slot)
        self._open -= 1
        if not entry.slots:
            del self._addresses[slot.address]

    def _most_of(self, address: str) -> int:
        is_local = address == "::1" or address.startswith("127.")
        return self.limits.per_loopback if is_local else self.limits.per_address

    def _evict(self, idle: dict[ConnectionSlot, None]) -> bool:
        slot = next(iter(idle), None)
        if slot is None:
            return False
        self.release(slot)
        self.evicted += 1
        slot.evict()
        return True

"""Waiting in a queue with several servers. Seconds; pure.

M/G/c is taken as M/M/c with the wait scaled by (1 + k)/2, where k is the squared coefficient of
variation of the service time (Allen, "Probability, Statistics, and Queueing Theory", 2nd edition,
section 5.3: the Allen-Cunneen approximation), and an exponential tail of that mean for those who
wait at all.
"""

from __future__ import annotations

import math

LARGEST = 100_000.0
"""Erlangs: more than any limit of workers, whatever a device says of itself."""


def erlang_c(servers: int, load: float) -> float:
    """The share of customers that wait, with ``load`` servers busy on average (Erlang, 1917), by
    the recursion of Erlang's B formula. 1 where the load is the servers' or more."""
    if load <= 0:
        return 0.0
    return 1.0 if load >= servers else _waiting(servers, load, _blocked(servers, load))


def _blocked(servers: int, load: float) -> float:
    """Erlang's B: the share that a system without a queue turns away."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


def _waiting(servers: int, load: float, blocked: float) -> float:
    """C from B."""
    return servers * blocked / (servers - load * (1.0 - blocked))


def mean_wait_s(servers: int, load: float, service_s: float, spread: float) -> float:
    """Mean wait of all; infinite where the load is the servers' or more. ``spread``: k."""
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * _waiters_s(servers, load, service_s, spread)


def late_share(
    servers: int, load: float, service_s: float, spread: float, patience_s: float
) -> float:
    """The share of customers that wait longer than ``patience_s``."""
    if load >= servers:
        return 1.0
    return erlang_c(servers, load) * _longer(servers, load, service_s, spread, patience_s)


def _longer(servers: int, load: float, service_s: float, spread: float, patience_s: float) -> float:
    """Of those who wait, the share that does so for longer than ``patience_s``."""
    mean_s = _waiters_s(servers, load, service_s, spread)
    return math.exp(-max(0.0, patience_s) / mean_s) if mean_s else 0.0


def _waiters_s(servers: int, load: float, service_s: float, spread: float) -> float:
    """Mean wait of those who wait."""
    return service_s * (1.0 + spread) / (2.0 * (servers - load))


def least_servers(
    load: float, service_s: float, spread: float, patience_s: float, late: float
) -> int:
    """The least number with which at most a share ``late`` waits longer than ``patience_s``; above
    LARGEST that with which the queue has an end."""
    servers = max(1, math.floor(load) + 1)
    if load > LARGEST:
        return servers
    blocked = _blocked(servers, load)  # one server more is one step more of the recursion
    while (
        _waiting(servers, load, blocked) * _longer(servers, load, service_s, spread, patience_s)
        > late
    ):
        servers += 1
        blocked = load * blocked / (servers + load * blocked)
    return servers

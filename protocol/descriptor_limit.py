"""Raises the limit of open files (RLIMIT_NOFILE) of a process, and shares it out.

Every client, worker and file of a process takes one descriptor. Shells and container runtimes start
programs with a soft limit of 1024 for the sake of programs that use ``select``; Baton's do not, so
that each process raises the soft limit to the hard one when it starts. Its children inherit it.
"""

from __future__ import annotations

import resource

_MOST = 1 << 20
"""Descriptors that are asked for at most. Some container runtimes allow a billion, and programs
that close all descriptors before they start a child would take minutes with it."""

_RESERVE = 256
"""Descriptors that a router keeps for workers, Redis, its log and files, at least."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one; return the number of descriptors allowed now.

    Never lowers the limit and never fails: where the system refuses, the present limit stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = reachable_limit(soft, hard)
    if soft in (resource.RLIM_INFINITY, wanted):
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted


def reachable_limit(soft: int, hard: int) -> int:
    """Return what ``raise_descriptor_limit`` makes of these limits, at least the soft one."""
    soft, hard = (_MOST if x == resource.RLIM_INFINITY else x for x in (soft, hard))
    return max(soft, min(hard, _MOST))


def connections_within(descriptors: int) -> int:
    """Return how many clients a router with this many descriptors can take.

    An eighth of them, and at least 256, stay for everything else; of very few, one half.
    """
    return descriptors - min(descriptors // 2, max(_RESERVE, descriptors // 8))


def descriptors_for(connections: int) -> int:
    """Return the fewest descriptors, in thousands of 1024, with which a router takes so many."""
    descriptors = 1024
    while connections_within(descriptors) < connections:
        descriptors += 1024
    return descriptors

"""Which objectives a request that has ended is weighed by, and whether it met them.

first token came            ttft: met or missed                  tpot: by the tokens after it
none came, for too long     ttft: missed, though the client gave up
ended well                  all: met, if each of the others is
ended by an error (5xx)     all: missed
given up, or refused        all: missed, if one of the others is by then; else nobody knows
wrong of the client (4xx)   by none, but what came before
"""

from __future__ import annotations

from typing import NamedTuple

from router.snapshot import Objectives

SLOS = ("ttft", "tpot", "all")


class Times(NamedTuple):
    """Of a request, in seconds: from its arrival to its end; to its first token, None: there was
    none; of each token after it, on average, None: there was none."""

    whole_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None


def weighed(status: str, times: Times, goals: Objectives) -> dict[str, bool]:
    """Met or missed, by the objective's name; what is not in it does not count. ``status``: ok,
    cancelled, or the HTTP status of its error."""
    found = {}
    if times.ttft_s is not None:
        found["ttft"] = times.ttft_s <= goals.ttft_s
    elif status == "504" or (_is_owed(status) and times.whole_s > goals.ttft_s):
        found["ttft"] = False
    if times.tpot_s is not None:
        found["tpot"] = times.tpot_s <= goals.tpot_s
    if status == "ok" and not found:
        return {}  # the prompt alone was wanted
    well = all(found.values())
    if status == "ok" or status.startswith("5") or not well:
        found["all"] = status == "ok" and well
    return found


def _is_owed(status: str) -> bool:
    """It should have had a token, had it been quick enough: all but what the client did wrong.
    An answer without one (ok) was to have none."""
    return status in ("cancelled", "429") or status.startswith("5")

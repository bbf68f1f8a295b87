"""Prefill workers for a load of prompts. Seconds; pure.

    c   least with ErlangC(c, a)*exp(-2(c - a)B/(E[S](1 + k))) <= LATE, and c >= a*(1 + x)
    x   what is to spare, since load grows by GROWTH while a worker starts

Load that grows evenly from a to a*(1 + g) within s exceeds c = a*(1 + x) from s*x/g on; what then
waits takes c workers s*(g - x)^2/(2g). Half of the patience B may go to that: x = g - sqrt(g*B/s).
"""

from __future__ import annotations

import math

from cluster.sizing.moments import Service
from cluster.sizing.queueing import least_servers

LATE = 0.1
"""Share of requests that may wait longer than the objective leaves time for."""
GROWTH = 0.25
"""g. Of the 58 minutes of Azure's trace of conversations six bring more than a quarter more prompt
tokens than the minute before."""
ERROR = 0.03
"""Least x: the load is known with an error."""
UTILISATION = 0.8
"""Of workers where the objective cannot be met, and of links always."""


def servers(load: float, of: Service, patience_s: float, start_s: float) -> int:
    """Least workers for ``load`` erlangs."""
    if load <= 0:
        return 0
    if patience_s <= 0:
        return math.ceil(load / UTILISATION)
    least = least_servers(load, of.mean_s, of.spread, patience_s, LATE)
    return max(least, math.ceil(load * (1.0 + spare(patience_s, start_s))))


def spare(patience_s: float, start_s: float) -> float:
    """x. The longer prompts may wait and the quicker workers start, the less."""
    if start_s <= 0:
        return ERROR
    return max(ERROR, GROWTH - math.sqrt(GROWTH * max(0.0, patience_s) / start_s))

"""The load of a decode worker, so that nothing counts twice.

Own work is counted exactly; what other routers have in a worker is what it reports minus what of
it was our own when it reported.
"""

from __future__ import annotations

from typing import NamedTuple


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

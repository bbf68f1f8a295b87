"""What a decision says."""

from __future__ import annotations

from cluster.sizing.decision import RoleDemand, describe_decision
from cluster.sizing.snapshot import WorkerCounts

NEED = RoleDemand(workers=1, load=0.5, each=2.0, link_floor=0)


def test_why_nothing_is_done() -> None:
    have = WorkerCounts(prefill=1, decode=2)
    less = describe_decision(
        "settling", have, WorkerCounts(prefill=1, decode=1), {"prefill": NEED, "decode": NEED}
    )
    assert (
        less.startswith("prefill 1 (") and "decode 2 -> 1 (" in less and "would be enough" in less
    )
    more = describe_decision(
        "settling", have, WorkerCounts(prefill=1, decode=3), {"prefill": NEED, "decode": NEED}
    )
    assert "decode 2 -> 3 (" in more and "some more are needed" in more

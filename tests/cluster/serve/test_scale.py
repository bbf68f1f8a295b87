"""What `baton scale` takes, and what it says of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.serve.scale import parse_replica_counts, scale_cluster
from protocol.errors import StartupError


def test_replica_counts_are_parsed_by_kind() -> None:
    assert parse_replica_counts(["prefill=3", "decode=5"]) == {"prefill": 3, "decode": 5}
    assert parse_replica_counts(["routers=2"]) == {"router": 2}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prefil=3"], "'prefil=3': expected one or more of prefill=N decode=N routers=N"),
        (["decode"], "'decode': expected one or more"),
        (["decode=-1"], "'decode=-1': expected one or more"),
        (["decode=\u0663"], "expected one or more"),
        (["decode=0"], "'decode=0': expected a number from 1 to 10000"),
        (["decode=10001"], "expected a number from 1 to 10000"),
        (["decode=2", "decode=3"], "decode is given twice"),
    ],
)
def test_invalid_replica_counts_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        parse_replica_counts(words)


def test_scaling_without_a_running_cluster_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    with pytest.raises(StartupError, match="no cluster 'none' of this user serves on this machine"):
        scale_cluster("none", {"decode": 2}, None, 1.0)

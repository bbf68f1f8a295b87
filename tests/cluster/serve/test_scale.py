"""What `baton scale` takes, and what it says of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.serve.scale import parse, scale
from protocol.errors import StartupError


def test_counts_by_kind() -> None:
    assert parse(["prefill=3", "decode=5"]) == {"prefill": 3, "decode": 5}
    assert parse(["routers=2"]) == {"router": 2}


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
def test_what_it_does_not_take(words: list[str], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        parse(words)


def test_where_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    with pytest.raises(StartupError, match="no cluster 'none' of this user serves on this machine"):
        scale("none", {"decode": 2}, None, 1.0)

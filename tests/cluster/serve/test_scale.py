"""What `baton scale` takes, and what it says of the rest."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local.start_report import StageWaiting
from cluster.serve import deploy
from cluster.serve.replica_kinds import ReplicaKind
from cluster.serve.scale import _change_text, parse_replica_counts, scale_cluster, set_replicas
from protocol.errors import StartupError


def test_replica_counts_are_parsed_by_kind() -> None:
    assert parse_replica_counts(["prefill=3", "decode=5"]) == {"prefill": 3, "decode": 5}
    assert parse_replica_counts(["routers=2"]) == {"router": 2}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["prefil=3"],
            r"'prefil=3': expected one or more of prefill=N decode=N routers=N; did you mean"
            r" prefill=3\?",
        ),
        (["router=2"], r"did you mean routers=2\?"),
        (["x" * 200], f"'{'x' * 40}...': expected one or more"),
        (["decode"], "'decode': expected one or more of prefill=N decode=N routers=N$"),
        (["decode=-1"], "'decode=-1': expected a number from 1"),
        (["decode=two"], "'decode=two': expected a number from 1"),
        (["decode=\u0663"], "expected a number from 1"),
        (["decode=" + "9" * 5000], "expected a number from 1"),
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
        scale_cluster("none", {"decode": 2}, None, 1.0, lambda _: None, lambda _: True)


class FakeServe:
    """The targets and running replicas of a Serve whose replicas start ``started`` at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, started: int) -> None:
        self.targets: dict[ReplicaKind, int] = {"prefill": 1}
        self.started = started
        self.overtaken_by: int | None = None
        self.interrupts_set = False
        monkeypatch.setattr(deploy, "target_replicas", self._read)
        monkeypatch.setattr(deploy, "set_target_replicas", self._set)
        monkeypatch.setattr(deploy, "serve_applications", lambda *_: {})
        monkeypatch.setattr(deploy, "count_running", lambda _: self._running())
        monkeypatch.setattr(deploy, "running_replicas", self._running)
        monkeypatch.setattr(deploy, "declared_slots", lambda _: "")

    def _read(self, *_: float) -> dict[ReplicaKind, int]:
        if self.targets["prefill"] > 1 and self.overtaken_by is not None:
            self.targets["prefill"] = self.overtaken_by
        return dict(self.targets)

    def _set(self, kind: ReplicaKind, count: int) -> None:
        self.targets[kind] = count
        if self.interrupts_set:
            self.interrupts_set = False
            os.kill(os.getpid(), signal.SIGINT)

    def _running(self) -> dict[ReplicaKind, int]:
        return {"prefill": min(self.started, self.targets["prefill"])}


def ignore(_: StageWaiting) -> None:
    pass


def test_replicas_that_have_not_started_at_the_deadline_are_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = FakeServe(monkeypatch, started=3)
    with pytest.raises(StartupError, match=r"3 of 8 prefill run.*withdrawn, and prefill=3 stays"):
        set_replicas({"prefill": 8}, {"prefill": 1}, 0.0, ignore)
    assert served.targets == {"prefill": 3}


def test_a_later_scale_overtakes_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    served = FakeServe(monkeypatch, started=1)
    served.overtaken_by = 2
    with pytest.raises(StartupError, match="another command has set prefill=2 in the meantime"):
        set_replicas({"prefill": 8}, {"prefill": 1}, 60.0, ignore)
    assert served.targets == {"prefill": 2}


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A process that a shell has started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_while_replicas_start_withdraws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    served = FakeServe(monkeypatch, started=1)
    with pytest.raises(StartupError, match=r"^interrupted; the others are withdrawn"):
        set_replicas({"prefill": 8}, {"prefill": 1}, 60.0, interrupt)
    assert served.targets == {"prefill": 1}


def interrupt(_: StageWaiting) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_while_counts_are_set_withdraws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    served = FakeServe(monkeypatch, started=1)
    served.interrupts_set = True
    with pytest.raises(StartupError, match=r"^interrupted; the others are withdrawn"):
        set_replicas({"prefill": 8}, {"prefill": 1}, 60.0, ignore)
    assert served.targets == {"prefill": 1}


def test_a_number_that_stays_is_called_unchanged() -> None:
    assert _change_text("prefill", 1, 1) == "prefill 1 (unchanged)"
    assert _change_text("decode", 1, 2) == "decode 1 -> 2"

"""A `baton up` of a cluster that runs: what is refused, what is asked, and what is printed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.config import assemble
from cluster.config.schema import Config
from cluster.launch import up, update, worker_memory
from cluster.local.run_state import ClusterHome, RunState
from cluster.local.start_report import StartReporter
from cluster.models.locate import demo_path
from cluster.serve import deploy, scale
from cluster.serve.node_settings import program_fingerprint
from cluster.serve.replica_kinds import SCALABLE_KINDS, ReplicaKind
from cluster.serve.router_probe import RouterProbe
from cluster.serve.scale_limits import NodeRoom
from cluster.settings.launch_settings import LaunchSettings
from protocol.errors import UsageError
from protocol.security.tls import HttpTls

CONFIG: dict[str, Any] = {"cluster": "audit", "worker": {"device": "cpu"}}
Update = Callable[..., tuple[int, str]]


def test_only_what_a_running_cluster_cannot_change_is_named() -> None:
    before = assemble.launch_settings(Config())
    assert update.fixed_differences(before, replace(before, prefill=3, model_id="other")) == []
    moved = replace(before, port=before.port + 1)
    assert update.fixed_differences(before, moved) == ["router.port"]
    https = replace(before.router, http_tls=HttpTls(cert="c", key="k"))
    changed = update.fixed_differences(before, replace(before, router=https))
    assert changed == ["BATON_HTTP_TLS_CERT", "BATON_HTTP_TLS_KEY"]


class FakeServe:
    """A Serve that runs one replica of each kind, and notes what is deployed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.deployed: list[LaunchSettings] = []
        self.running: dict[ReplicaKind, int] = dict.fromkeys(SCALABLE_KINDS, 1)
        nodes = [NodeRoom(dict.fromkeys(SCALABLE_KINDS, 10_000), gpus=0)]
        monkeypatch.setattr(update, "_connected", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(deploy, "serve_applications", lambda *_: {})
        monkeypatch.setattr(deploy, "running_replicas", lambda *_: dict(self.running))
        monkeypatch.setattr(scale, "_nodes", lambda: nodes)
        monkeypatch.setattr(deploy, "deploy_cluster", self._deploy)
        monkeypatch.setattr(RouterProbe, "wait_until_answering", lambda *_, **__: 1)

    def _deploy(self, launch: LaunchSettings, *_: object) -> None:
        self.deployed.append(launch)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    return FakeServe(monkeypatch)


@pytest.fixture
def run_update(
    served: FakeServe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Update]:
    """Updates a running cluster of the demo model with changed keys; returns status and output."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(worker_memory, "usable_bytes", lambda _: 16 << 30)
    (run_dir := tmp_path / "run").mkdir()
    found = {"model_path": str(demo_path()), "model_id": "baton-demo", "run_dir": str(run_dir)}
    replace(assemble.launch_settings(Config.model_validate(CONFIG)), **found).write()
    home = ClusterHome("audit")
    state = RunState(
        run_dir=str(run_dir), url="http://127.0.0.1:8000", model_id="baton-demo", ray_address="r"
    )
    state = replace(state, program=program_fingerprint())

    def run(confirm: scale.Confirm = lambda _: True, **changes: Any) -> tuple[int, str]:
        wanted = assemble.launch_settings(Config.model_validate(CONFIG | changes))
        port_moves = "router" not in changes
        with StartReporter() as report:
            status = update.update_cluster(
                home, state, wanted, None, report, confirm, port_moves=port_moves
            )
        return status, " ".join(capsys.readouterr().out.split())

    yield run


def test_counts_that_do_not_fit_are_refused_with_numbers(
    served: FakeServe, run_update: Update
) -> None:
    status, said = run_update(pools={"prefill": {"workers": 1000}})
    assert (status, served.deployed) == (1, [])
    assert "check failed: prefill=1000 needs" in said
    assert "fits; nothing was changed" in said


def test_sizes_that_do_not_fit_are_refused_with_numbers(
    served: FakeServe, run_update: Update
) -> None:
    status, said = run_update(worker={"device": "cpu", "kv_tokens": 50_000_000})
    assert (status, served.deployed) == (1, [])
    assert "a new replica starts before an old one stops, and needs" in said
    assert "16.0 GiB are free: lower --kv-tokens" in said


def test_memory_of_replicas_that_are_replaced_counts_as_free(
    served: FakeServe, run_update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_memory, "usable_bytes", lambda _: 2 << 30)
    status, said = run_update(worker={"device": "cpu", "max_batch": 32})
    assert (status, len(served.deployed)) == (0, 1), said


@pytest.mark.skipif(bool(update.ray_runtime.gpu_count()), reason="a GPU is here")
def test_checks_of_a_start_are_made_before_ray_is_asked(
    served: FakeServe, run_update: Update
) -> None:
    status, said = run_update(worker={"device": "cuda"})
    assert (status, served.deployed) == (1, [])
    assert "worker.device is cuda, but no GPU is visible" in said


def test_large_jumps_are_confirmed_all_at_once(served: FakeServe, run_update: Update) -> None:
    asked: list[str] = []

    def refuse(change: str) -> bool:
        asked.append(change)
        raise UsageError(f"{change} is a large change: give --yes to confirm it")

    status, said = run_update(
        refuse, pools={"prefill": {"workers": 9}}, router={"replicas": 10, "port": 8000}
    )
    assert (status, served.deployed) == (2, []), said
    assert asked == ["prefill: 1 -> 9, routers: 1 -> 10"]


def test_each_thing_that_changes_has_a_line(served: FakeServe, run_update: Update) -> None:
    served.running["prefill"] = 2
    pools = {"decode": {"max_batch": 32}}
    status, said = run_update(pools=pools, limits={"max_requests": 9})
    assert status == 0
    assert "prefill: 2 -> 1 workers, as configured (pools.prefill.workers)" in said
    assert "decode: replaced, max_batch default -> 32" in said
    assert "routers: replaced, max_requests" in said
    assert "prefill: replaced" not in said


def test_an_update_without_a_change_says_so(served: FakeServe, run_update: Update) -> None:
    assert "nothing has changed" in run_update()[1]
    assert "nothing has changed" in run_update()[1]


def test_another_program_replaces_all_replicas(
    run_update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "program_fingerprint", lambda: "new")
    said = run_update()[1]
    for kind in ("prefill", "decode", "routers"):
        assert f"{kind}: replaced, another version of Baton" in said


def test_refusals_name_the_command_for_this_cluster(run_update: Update) -> None:
    said = run_update(router={"port": 1})[1]
    assert "router.port cannot change" in said
    assert "baton down --cluster audit` first" in said


def test_a_cluster_that_starts_is_stopped_by_its_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    home = ClusterHome("audit")
    home.write(RunState(run_dir="r", url="http://127.0.0.1:8000", model_id="m"))
    assert up._already_text(home).endswith("baton down --cluster audit`")

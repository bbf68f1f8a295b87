"""How a deployment is laid out, and how long it may take: what is decided before Serve is asked."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from ray import serve
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
)

from cluster import deploy, ray_runtime, serve_app
from cluster.config import assemble
from cluster.config.schema import Config
from cluster.kinds import Kind
from cluster.launch import Launch
from cluster.place import Place
from cluster.serve_app import Layout
from protocol.errors import StartupError


@pytest.fixture
def launch() -> Launch:
    made = assemble.launch(Config(drain_s=20.0, start_deadline_s=60.0))
    return msgspec.structs.replace(made, prefill=2, decode=10)


LAYOUT = Layout(Place(None, 20.0, "a program"), gpus=0.0)


def deployment(kind: Kind, launch: Launch, room: int = 0, layout: Layout = LAYOUT) -> object:
    return serve_app.built(kind, launch, layout, room)._bound_deployment


def test_a_start_has_one_deadline(launch: Launch) -> None:
    assert deploy._within(launch, {}, {"prefill": 0, "decode": 0}) == 60


@pytest.mark.parametrize(("room", "lots"), [(0, 5), (1, 5), (4, 3), (10, 1)])
def test_an_update_has_one_for_each_lot(launch: Launch, room: int, lots: int) -> None:
    within = deploy._within(launch, {"prefill": 2, "decode": 10}, {"decode": room})
    assert within == 60 + lots * (60 + 20 + 15)


def test_new_ones_come_first_where_there_is_room(launch: Launch) -> None:
    percents = [
        deployment("decode", launch, room)._deployment_config.max_surge_percent  # type: ignore[attr-defined]
        for room in (0, 1, 3, 10, 99)
    ]
    assert percents == [0, 10, 30, 100, 100]


def test_room_is_what_nodes_declare_beyond_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = {"baton_decode": 4.0, "baton_router": 1.0}
    monkeypatch.setattr(ray_runtime, "declared", lambda: declared)
    monkeypatch.setattr(ray_runtime, "available", lambda: {"GPU": 1.0})
    assert [deploy._room("decode", running, 0.0) for running in (0, 3, 4, 9)] == [4, 1, 0, 0]
    assert deploy._room("decode", 1, gpus=1.0) == 1  # slots for three, a GPU for one
    assert deploy._room("prefill", 0, 0.0) == 0
    assert deploy._room("router", 0, gpus=1.0) == 1


def test_only_what_changed_is_another_version(launch: Launch) -> None:
    more = msgspec.structs.replace(launch, decode=11)
    other = msgspec.structs.replace(
        launch, router=msgspec.structs.replace(launch.router, ttft_slo_s=1.0)
    )
    elsewhere = Layout(LAYOUT.place, gpus=1.0)
    newer = Layout(msgspec.structs.replace(LAYOUT.place, program="another"), 0.0)

    def versions(launch: Launch, layout: Layout = LAYOUT) -> list[str]:
        kinds: tuple[Kind, ...] = ("prefill", "decode", "router")
        return [deployment(kind, launch, 0, layout).version for kind in kinds]  # type: ignore[attr-defined]

    before = versions(launch)
    assert versions(more) == before
    assert [a == b for a, b in zip(versions(other), before, strict=True)] == [True, True, False]
    moved = versions(launch, elsewhere)
    assert [a == b for a, b in zip(moved, before, strict=True)] == [False, False, True]
    assert not set(versions(launch, newer)) & set(before)


def test_a_node_with_another_program_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "node_address", lambda: "10.0.0.7")
    with pytest.raises(StartupError, match=r"10\.0\.0\.7 has another version of Baton"):
        LAYOUT.place.check()


def test_failed_starts_are_told_apart() -> None:
    """By what Serve says; it counts down from a number that it never gets to."""
    said = "A replica failed to start with exception. Retrying {} more time(s). Error:\nTraceback"
    texts = [
        said.format(999_999),
        said.format(999_998),
        "A replica failed to start. Retrying. Error",
    ]
    found = [deploy._failed_starts(_overview(text)) for text in texts]
    assert found == [["999999"], ["999998"], []]


def test_what_keeps_replicas_from_starting_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "A replica failed to start with exception. Retrying. Error:\nStartupError: no GPU"
    there = {"baton-decode": _overview(said), "baton-prefill": _overview("waiting for a node")}
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=there))
    assert deploy._failing(["decode", "prefill", "router"]) == ["no GPU"]


def _overview(message: str) -> ApplicationStatusOverview:
    deployment = DeploymentStatusOverview(
        status=DeploymentStatus.UPDATING,
        status_trigger=DeploymentStatusTrigger.CONFIG_UPDATE_STARTED,
        replica_states={},
        message=message,
    )
    return ApplicationStatusOverview(
        status=ApplicationStatus.DEPLOYING,
        message="",
        last_deployed_time_s=0.0,
        deployments={"PrefillWorker": deployment},
    )

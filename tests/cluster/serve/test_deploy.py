"""How a deployment is laid out, and how long it may take: what is decided before Serve is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray import serve
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
)

from cluster.config import assemble
from cluster.config.schema import Config
from cluster.serve import applications, attached, deploy, node, ray_runtime, scale
from cluster.serve.applications import Layout
from cluster.serve.node import Place
from cluster.serve.replica_kinds import ACTING, ADVISING, APPLICATIONS, Kind, class_name, resource
from cluster.settings.launch_settings import Launch
from protocol.errors import StartupError


@pytest.fixture
def launch() -> Launch:
    made = assemble.launch(Config(drain_s=20.0, start_deadline_s=60.0))
    return msgspec.structs.replace(made, prefill=2, decode=10)


LAYOUT = Layout(Place(None, 20.0, "a program"), gpus=0.0)


def deployment(kind: Kind, launch: Launch, room: int = 0, layout: Layout = LAYOUT) -> object:
    return applications.built(kind, launch, layout, room)._bound_deployment


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


def test_deployments_have_the_names_that_they_are_asked_for_by(launch: Launch) -> None:
    for mode, name in (("act", ACTING), ("advise", ADVISING)):
        settings = msgspec.structs.replace(launch.autoscaler, mode=mode)
        made = msgspec.structs.replace(launch, autoscaler=settings)
        for kind in APPLICATIONS:
            built: Any = deployment(kind, made)
            assert built.name == (class_name(kind) if kind != "autoscaler" else name)
            resources = built._replica_config.resource_dict.keys()
            assert (resource(kind) in resources) == (kind != "autoscaler")


def test_an_autoscaler_is_only_where_one_is_wanted(launch: Launch) -> None:
    assert applications.count("autoscaler", launch) == 0
    settings = msgspec.structs.replace(launch.autoscaler, mode="advise")
    assert (
        applications.count("autoscaler", msgspec.structs.replace(launch, autoscaler=settings)) == 1
    )
    assert deploy._room("autoscaler", 1, gpus=1.0) == 0


def test_what_an_autoscaler_is_told(launch: Launch) -> None:
    secret = msgspec.structs.replace(
        launch.autoscaler, mode="act", prometheus_url="http://u:hunter2@h:1"
    )
    made = applications._autoscaler_settings(msgspec.structs.replace(launch, autoscaler=secret))
    assert (made.prometheus_url, made.token, made.redis_url, made.log) == (None, "", "", None)
    here = msgspec.structs.replace(launch, run_dir="/run", model_id="m")
    told = applications._autoscaler_settings(here)
    assert (told.log, told.model_id) == ("/run/decisions.jsonl", "m")


def test_a_secret_in_a_url_is_each_nodes_own(launch: Launch) -> None:
    url = "http://u:hunter2@h:1"
    wanted = msgspec.structs.replace(launch.autoscaler, mode="act", prometheus_url=url)
    knows = Config.model_validate({"autoscaler": {"prometheus_url": url}})
    attached._check_prometheus(wanted, knows)
    with pytest.raises(StartupError, match="BATON_AUTOSCALER_PROMETHEUS_URL") as error:
        attached._check_prometheus(wanted, Config())
    assert "hunter2" not in str(error.value)
    attached._check_prometheus(msgspec.structs.replace(wanted, mode="off"), Config())
    plain = msgspec.structs.replace(wanted, prometheus_url="http://h:1")
    attached._check_prometheus(plain, Config())
    assert node.autoscaler(plain, Config(), None).prometheus_url == "http://h:1"
    assert node.autoscaler(plain, knows, "10.0.0.1").prometheus_url == url


def test_numbers_that_an_autoscaler_left_stay_within_its_limits(launch: Launch) -> None:
    kept = launch.with_workers({"prefill": 3, "decode": 99})
    assert (kept.prefill, kept.decode) == (3, 8)
    assert launch.with_workers({"prefill": 0}).prefill == 1
    assert launch.with_workers({}) == launch


def test_gpus_of_one_machine_are_shared_by_all_that_may_come(launch: Launch) -> None:
    settings = msgspec.structs.replace(launch.autoscaler, mode="act")
    made = msgspec.structs.replace(launch, prefill=1, decode=1)
    assert made.most_workers(1) == 2
    made = msgspec.structs.replace(made, autoscaler=settings)
    assert (made.most_workers(1), made.most_workers(2)) == (16, 2)


@pytest.mark.parametrize("name", [ACTING, ADVISING, ""])
def test_numbers_that_are_an_autoscalers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overview = _overview("")
    overview.deployments = {name: overview.deployments["PrefillWorker"]}
    there = {"baton-autoscaler": overview} if name else {}
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=there))
    assert deploy.acting() == (name == ACTING)
    scale._check({"router"})
    if name != ACTING:
        scale._check({"decode"})
        return
    with pytest.raises(StartupError, match=r"number of decode workers \(autoscaler\.mode is act\)"):
        scale._check({"decode", "router"})


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
    assert scale._failing(["decode", "prefill", "router"]) == ["no GPU"]


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

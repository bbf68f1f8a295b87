"""Tests of the layout, the names and the deadlines of a deployment, without starting Serve."""

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
from cluster.serve import applications, deploy, external_cluster, node_settings, ray_runtime, scale
from cluster.serve.applications import ReplicaLayout
from cluster.serve.node_settings import ReplicaContext
from cluster.serve.replica_kinds import (
    ACTING_AUTOSCALER,
    ADVISING_AUTOSCALER,
    ALL_KINDS,
    ReplicaKind,
    deployment_name,
    resource_name,
)
from cluster.settings.launch_settings import LaunchSettings, share_of_gpu
from protocol.errors import StartupError


@pytest.fixture
def launch() -> LaunchSettings:
    made = assemble.launch_settings(Config(drain_s=20.0, start_deadline_s=60.0))
    return msgspec.structs.replace(made, prefill=2, decode=10)


LAYOUT = ReplicaLayout(ReplicaContext(None, 20.0, "a program"), gpus=0.0)


def deployment(
    kind: ReplicaKind, launch: LaunchSettings, surge: int = 0, layout: ReplicaLayout = LAYOUT
) -> object:
    return applications.build_application(kind, launch, layout, surge)._bound_deployment


def test_counts_of_a_scale_are_replaced_by_the_configured_ones(
    launch: LaunchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Serve leaves them where the same application is deployed again."""
    targets: dict[ReplicaKind, int] = {"prefill": 3, "decode": 10}
    monkeypatch.setattr(deploy, "target_replicas", lambda: dict(targets))
    monkeypatch.setattr(deploy, "set_target_replicas", targets.__setitem__)
    waited: list[object] = []
    monkeypatch.setattr(deploy, "wait_until_running", lambda *_, counts: waited.append(counts))
    deploy._apply_counts(["prefill"], launch, lambda _: None)
    deploy._apply_counts(["decode"], launch, lambda _: None)
    assert targets == {"prefill": 2, "decode": 10} and waited == [{"prefill": 2}]
    acting = msgspec.structs.replace(launch.autoscaler, mode="act")
    targets["prefill"] = 5
    launch = msgspec.structs.replace(launch, autoscaler=acting)
    deploy._apply_counts(["prefill"], launch, lambda _: None)
    assert targets["prefill"] == 5, "the autoscaler sets it"


def test_surge_percent_starts_new_replicas_first_when_nodes_have_slots(
    launch: LaunchSettings,
) -> None:
    percents = [
        deployment("decode", launch, surge)._deployment_config.max_surge_percent  # type: ignore[attr-defined]
        for surge in (0, 1, 3, 10, 99)
    ]
    assert percents == [0, 10, 30, 100, 100]


def test_surge_is_limited_by_free_slots_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = {"baton_decode": 4.0, "baton_router": 1.0}
    monkeypatch.setattr(ray_runtime, "declared_resources", lambda: declared)
    monkeypatch.setattr(ray_runtime, "available_resources", lambda: {"GPU": 1.0})
    assert [deploy._surge("decode", running, 0.0) for running in (0, 3, 4, 9)] == [4, 1, 0, 0]
    assert deploy._surge("decode", 1, gpus=1.0) == 1  # slots for three, a GPU for one
    assert deploy._surge("prefill", 0, 0.0) == 0
    assert deploy._surge("router", 0, gpus=1.0) == 1


def test_only_replicas_whose_arguments_change_get_another_version(launch: LaunchSettings) -> None:
    more = msgspec.structs.replace(launch, decode=11)
    other = msgspec.structs.replace(
        launch, router=msgspec.structs.replace(launch.router, ttft_slo_s=1.0)
    )
    elsewhere = ReplicaLayout(LAYOUT.context, gpus=1.0)
    newer = ReplicaLayout(msgspec.structs.replace(LAYOUT.context, program="another"), 0.0)

    def versions(launch: LaunchSettings, layout: ReplicaLayout = LAYOUT) -> list[str]:
        kinds: tuple[ReplicaKind, ...] = ("prefill", "decode", "router")
        return [deployment(kind, launch, 0, layout).version for kind in kinds]  # type: ignore[attr-defined]

    before = versions(launch)
    assert versions(more) == before
    assert [a == b for a, b in zip(versions(other), before, strict=True)] == [True, True, False]
    moved = versions(launch, elsewhere)
    assert [a == b for a, b in zip(moved, before, strict=True)] == [False, False, True]
    assert not set(versions(launch, newer)) & set(before)


def test_replica_refuses_a_node_with_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "node_address", lambda: "10.0.0.7")
    with pytest.raises(StartupError, match=r"10\.0\.0\.7 has another version of Baton"):
        LAYOUT.context.check_program()


def test_deployments_have_the_names_by_which_serve_is_asked(launch: LaunchSettings) -> None:
    for mode, name in (("act", ACTING_AUTOSCALER), ("advise", ADVISING_AUTOSCALER)):
        settings = msgspec.structs.replace(launch.autoscaler, mode=mode)
        made = msgspec.structs.replace(launch, autoscaler=settings)
        for kind in ALL_KINDS:
            built: Any = deployment(kind, made)
            assert built.name == (deployment_name(kind) if kind != "autoscaler" else name)
            resources = built._replica_config.resource_dict.keys()
            assert (resource_name(kind) in resources) == (kind != "autoscaler")


def test_autoscaler_is_deployed_only_in_advise_and_act_mode(launch: LaunchSettings) -> None:
    assert applications.configured_replicas("autoscaler", launch) == 0
    settings = msgspec.structs.replace(launch.autoscaler, mode="advise")
    assert (
        applications.configured_replicas(
            "autoscaler", msgspec.structs.replace(launch, autoscaler=settings)
        )
        == 1
    )
    assert deploy._surge("autoscaler", 1, gpus=1.0) == 0


def test_autoscaler_settings_contain_no_secret(launch: LaunchSettings) -> None:
    secret = msgspec.structs.replace(
        launch.autoscaler, mode="act", prometheus_url="http://u:hunter2@h:1"
    )
    made = applications._autoscaler_settings(msgspec.structs.replace(launch, autoscaler=secret))
    assert (made.prometheus_url, made.token, made.redis_url, made.log) == (None, "", "", None)
    here = msgspec.structs.replace(launch, run_dir="/run", model_id="m")
    told = applications._autoscaler_settings(here)
    assert (told.log, told.model_id) == ("/run/decisions.jsonl", "m")


def test_prometheus_url_with_password_must_be_in_the_node_environment(
    launch: LaunchSettings,
) -> None:
    url = "http://u:hunter2@h:1"
    wanted = msgspec.structs.replace(launch.autoscaler, mode="act", prometheus_url=url)
    knows = Config.model_validate({"autoscaler": {"prometheus_url": url}})
    external_cluster._check_prometheus(wanted, knows)
    with pytest.raises(StartupError, match="BATON_AUTOSCALER_PROMETHEUS_URL") as error:
        external_cluster._check_prometheus(wanted, Config())
    assert "hunter2" not in str(error.value)
    external_cluster._check_prometheus(msgspec.structs.replace(wanted, mode="off"), Config())
    plain = msgspec.structs.replace(wanted, prometheus_url="http://h:1")
    external_cluster._check_prometheus(plain, Config())
    assert (
        node_settings.autoscaler_settings_here(plain, Config(), None).prometheus_url == "http://h:1"
    )
    assert node_settings.autoscaler_settings_here(plain, knows, "10.0.0.1").prometheus_url == url


def test_worker_counts_kept_from_the_autoscaler_stay_within_its_limits(
    launch: LaunchSettings,
) -> None:
    kept = launch.with_workers({"prefill": 3, "decode": 99})
    assert (kept.prefill, kept.decode) == (3, 8)
    assert launch.with_workers({"prefill": 0}).prefill == 1
    assert launch.with_workers({}) == launch


def test_gpus_of_one_machine_are_shared_by_the_most_workers_possible(
    launch: LaunchSettings,
) -> None:
    settings = msgspec.structs.replace(launch.autoscaler, mode="act")
    made = msgspec.structs.replace(launch, prefill=1, decode=1)
    assert made.most_workers(1) == 2
    made = msgspec.structs.replace(made, autoscaler=settings)
    assert (made.most_workers(1), made.most_workers(2)) == (16, 2)


@pytest.mark.parametrize(
    ("gpus", "workers", "share"),
    [(0, 2, 0.0), (1, 2, 0.5), (2, 2, 1.0), (8, 2, 1.0), (1, 3, 0.3333), (2, 3, 0.5), (4, 6, 0.5)],
)
def test_ray_can_place_every_worker_on_its_part_of_one_gpu(
    gpus: int, workers: int, share: float
) -> None:
    assert share_of_gpu(gpus, workers) == share
    if share:
        assert gpus * int(1 / share) >= workers


@pytest.mark.parametrize(
    ("gpus", "configured", "told"), [(0.0, None, None), (0.5, None, 0.5), (0.5, 0.3, 0.3)]
)
def test_engines_are_told_their_share_of_a_gpu(
    launch: LaunchSettings, gpus: float, configured: float | None, told: float | None
) -> None:
    decode = launch.workers["decode"]
    engine = msgspec.structs.replace(decode.engine, gpu_share=configured)
    workers = {**launch.workers, "decode": msgspec.structs.replace(decode, engine=engine)}
    launch = msgspec.structs.replace(launch, workers=workers)
    layout = ReplicaLayout(LAYOUT.context, gpus)
    settings, _ = applications._replica_arguments("decode", launch, layout)
    assert (settings.engine.gpu_share, settings.engine.device) == (told, "cuda" if gpus else "cpu")


@pytest.mark.parametrize("name", [ACTING_AUTOSCALER, ADVISING_AUTOSCALER, ""])
def test_worker_counts_of_an_acting_autoscaler_cannot_be_scaled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overview = _overview("")
    overview.deployments = {name: overview.deployments["PrefillWorker"]}
    there = {"baton-autoscaler": overview} if name else {}
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=there))
    assert deploy.is_autoscaler_acting() == (name == ACTING_AUTOSCALER)
    scale._check_not_autoscaled({"router"})
    if name != ACTING_AUTOSCALER:
        scale._check_not_autoscaled({"decode"})
        return
    with pytest.raises(StartupError, match=r"number of decode workers \(autoscaler\.mode is act\)"):
        scale._check_not_autoscaled({"decode", "router"})


def test_failed_starts_are_told_apart_by_the_retry_countdown() -> None:
    """By what Serve says; it counts down from a number that it never gets to."""
    said = "A replica failed to start with exception. Retrying {} more time(s). Error:\nTraceback"
    texts = [
        said.format(999_999),
        said.format(999_998),
        "A replica failed to start. Retrying. Error",
    ]
    found = [deploy._failed_starts(_overview(text)) for text in texts]
    assert found == [["999999"], ["999998"], []]


def test_scale_reports_why_replicas_fail_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "A replica failed to start with exception. Retrying. Error:\nStartupError: no GPU"
    there = {"baton-decode": _overview(said), "baton-prefill": _overview("waiting for a node")}
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=there))
    assert scale._failure_reasons(["decode", "prefill", "router"]) == ["no GPU"]


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

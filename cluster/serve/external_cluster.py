"""`baton up --address` and `baton down --address`: deploys on a Ray cluster that runs already.

The command runs on one of the cluster's nodes. Ray Serve keeps what was deployed, and nothing of
this process stays. Secrets and certificates are in each node's environment (see ``node_settings``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
from redis.exceptions import RedisError

from cluster.config import assemble
from cluster.config.schema import Config
from cluster.local.start_report import (
    ClusterReady,
    StageDone,
    StageFailed,
    StageNote,
    StageStarted,
    StartReporter,
)
from cluster.models import locate
from cluster.serve import node_settings, ray_nodes, ray_runtime
from cluster.serve.bounded_call import CONTROLLER_S, call_within
from cluster.serve.node_settings import ReplicaContext, program_fingerprint
from cluster.serve.replica_kinds import ALL_KINDS, SCALABLE_KINDS, ReplicaKind, count_change_text
from cluster.serve.scale import Confirm, check_room, confirm_large_jumps
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.connection import without_password
from cluster.settings.launch_settings import LaunchSettings
from protocol.errors import StartupError
from protocol.registry.directory import Directory
from protocol.registry.redis_client import connect
from protocol.roles import ROLES
from protocol.security.listen_hosts import check_worker_host
from router.settings import RouterSettings

if TYPE_CHECKING:
    from cluster.serve.applications import ReplicaLayout


class PrepareNodes(Protocol):
    """Checks the nodes before a deployment; ``memory``: their memory must be free. Raises
    StartupError."""

    def __call__(
        self,
        launch: LaunchSettings,
        layout: ReplicaLayout,
        report: StartReporter,
        *,
        memory: bool,
    ) -> None: ...


_REDIS_TIMEOUT_S = 5.0
_DEFAULT_HOST = "127.0.0.1"


def deploy_to_ray(
    wanted: LaunchSettings,
    model: str | None,
    address: str,
    routers: int | None,
    prepare: PrepareNodes,
    confirm: Confirm,
) -> int:
    """Deploy or update, and return exit status 0 when the cluster serves, 1 after an error.

    ``routers``: None for one on each node that takes routers. ``prepare`` checks the nodes and
    fetches the model onto them. ``confirm`` asks about large jumps of an update. Errors are
    printed."""
    with StartReporter() as report:
        stage = "check"
        try:
            report(StageStarted(stage))
            launch = _with_model(wanted, model)
            with ray_runtime.connected_to_ray(address):
                layout = _check_and_lay_out(launch, node_settings.node_config(), report)
                if routers is None:
                    routers = sum(node.takes("router") for node in ray_nodes.living_nodes())
                launch = msgspec.structs.replace(launch, routers=max(1, routers))
                report(StageDone(stage, f"a Ray cluster with {_declared_text()}"))
                stage = "nodes"
                prepare(launch, layout, report, memory=not _workers_run())
                stage = "deploy"
                ray_runtime.start_serve()
                launch = keep_autoscaled_counts(launch, report)
                _check_growth(launch, layout, confirm, report)
                report(StageStarted(stage))
                urls = _deploy_and_probe(launch, layout, report)
                report(StageDone(stage, launch.counts))
        except StartupError as error:
            report(StageFailed(stage, str(error)))
            return error.exit_status
        for url in urls[1:]:
            report.say(f"router   {url}")
        keys = launch.router.api_keys is not None
        report(ClusterReady(urls[0], launch.model_id, keys, launch.https_ca))
    return 0


def _workers_run() -> bool:
    from cluster.serve import deploy

    return any(deploy.running_replicas().get(role) for role in ROLES)


def _check_growth(
    launch: LaunchSettings, layout: ReplicaLayout, confirm: Confirm, report: StartReporter
) -> None:
    """Check the new counts of a cluster that runs, as `baton scale` does, and note those that
    change. Raises StartupError."""
    from cluster.serve import deploy
    from cluster.serve.applications import configured_replicas

    running = deploy.running_replicas()
    if any(running.get(role) for role in ROLES):
        counts = {kind: configured_replicas(kind, launch) for kind in SCALABLE_KINDS}
        check_room(running, counts, layout.gpus, None)
        confirm_large_jumps(running, counts, confirm)
        for line in count_changes(launch, running):
            report(StageNote(line))


def _with_model(wanted: LaunchSettings, model: str | None) -> LaunchSettings:
    """Return ``wanted`` with the model as each node is to look for it.

    Raises StartupError if this node does not find it."""
    found = locate.locate_model(model)
    own_home = model is None or found.repo is not None or model.startswith("~")
    path = (model or "") if own_home else str(found.path)
    return msgspec.structs.replace(wanted, model_path=path, model_id=wanted.model_id or found.id)


def _check_and_lay_out(launch: LaunchSettings, own: Config, report: StartReporter) -> ReplicaLayout:
    """Return the layout of the replicas.

    Raises StartupError for settings that this node refuses, since all nodes share them."""
    from cluster.serve.applications import ReplicaLayout, configured_replicas

    hosts = {"worker.host": launch.workers["decode"].host, "router.host": launch.host}
    for key, host in hosts.items():
        if host != _DEFAULT_HOST:
            raise StartupError(
                f"{key} is {host!r}, but on a cluster of hosts every process listens on its"
                " node's address: leave it out"
            )
    launch.check()
    address = ray_runtime.node_address()
    context = ReplicaContext(None, launch.drain_s, program_fingerprint())
    _check_prometheus(launch.autoscaler, own)
    worker = node_settings.worker_settings_here(launch.workers["decode"], own, address)
    check_worker_host(address, tls=worker.tls is not None)
    node_settings.router_settings_here(launch.router, own, address).check_host(address)
    nodes = ray_nodes.living_nodes()
    if worker.engine.device is None:
        pools: list[ReplicaKind] = [role for role in ROLES if configured_replicas(role, launch)]
        nodes = ray_nodes.wait_for_nodes(pools, launch.start_deadline_s, report)
    ray_nodes.check_same_program(nodes, context.program)
    gpus = any(node.resources.get("GPU") for node in nodes)
    device = worker.engine.device
    cuda = device == "cuda" or (not device and gpus)
    return ReplicaLayout(context, 1.0 if cuda else 0.0)


def _check_prometheus(settings: AutoscalerSettings, own: Config) -> None:
    """Raise StartupError for a URL with a secret that is not in the nodes' environment."""
    url = settings.prometheus_url
    if settings.mode == "off" or url is None or without_password(url) == url:
        return
    if assemble.autoscaler_settings(own).prometheus_url != url:
        raise StartupError(
            "autoscaler.prometheus_url has a password or options, and is not sent through Ray:"
            " set on every node BATON_AUTOSCALER_PROMETHEUS_URL (in node.env)"
        )


def _declared_text() -> str:
    resources = sorted(ray_runtime.declared_resources().items())
    named = [f"{v:g} {k}" for k, v in resources if k.startswith("baton_") or k == "GPU"]
    return ", ".join(named) or "no baton_ resources"


def keep_autoscaled_counts(launch: LaunchSettings, report: StartReporter) -> LaunchSettings:
    """Return ``launch`` with the worker counts that an acting autoscaler has set, and note this."""
    from cluster.serve import deploy
    from cluster.serve.applications import configured_replicas

    targets = deploy.autoscaler_targets() if launch.autoscaler.mode == "act" else {}
    if targets:
        launch = launch.with_workers(targets)
        shown = ", ".join(f"{configured_replicas(role, launch)} {role}" for role in targets)
        report(StageNote(f"the autoscaler controls the number of workers: {shown} stay"))
    return launch


def count_changes(launch: LaunchSettings, running: Mapping[ReplicaKind, int]) -> list[str]:
    """Return a line for each kind whose configured number differs from the ``running`` replicas."""
    from cluster.serve.applications import configured_replicas

    found = {kind: (running.get(kind, 0), configured_replicas(kind, launch)) for kind in ALL_KINDS}
    return [count_change_text(kind, old, new) for kind, (old, new) in found.items() if old != new]


def _deploy_and_probe(
    launch: LaunchSettings, layout: ReplicaLayout, report: StartReporter
) -> list[str]:
    """Deploy, wait until each router answers, and return the routers' URLs."""
    from cluster.serve import deploy
    from cluster.serve.router_probe import RouterProbe

    deploy.deploy_cluster(launch, layout, report)
    own = node_settings.router_settings_here(launch.router, node_settings.node_config(), None)
    urls = asyncio.run(_router_urls(own))
    keys = own.api_keys is not None
    for url in urls:
        probe = RouterProbe(url, own.http_tls)
        probe.wait_until_answering(launch.model_id, launch.start_deadline_s, report, keys=keys)
    return urls


async def _router_urls(settings: RouterSettings) -> list[str]:
    client = connect(settings.redis_url)
    try:
        async with asyncio.timeout(_REDIS_TIMEOUT_S):
            records = await Directory(client, settings.cluster).routers.all()
    except (RedisError, OSError, TimeoutError) as error:
        raise StartupError(
            f"the routers run, but their addresses cannot be read from Redis: {error}"
        ) from error
    finally:
        await client.aclose()
    urls = sorted({record.url for record in records if record.url})
    if not urls:
        raise StartupError("the routers run, but none is registered in Redis")
    return urls


def remove_from_ray(address: str, say: Callable[[str], None]) -> int:
    """Drain and delete what is deployed, and stop Serve; return 0. Raises StartupError."""
    from ray import serve

    with ray_runtime.connected_to_ray(address):
        from cluster.serve import deploy

        if not deploy.deployed_kinds():
            say("Baton is not deployed there")
            return 0
        say("draining: running requests may finish")
        deploy.drain_cluster()
        end: Callable[[], None] = serve.shutdown
        call_within(CONTROLLER_S, "Ray Serve", end)
    say("drained and removed; the Ray cluster itself still runs (`ray down` ends it)")
    return 0

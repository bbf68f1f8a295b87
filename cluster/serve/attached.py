"""`baton up`, `down` and `scale` on a Ray cluster that runs already, from one of its nodes.

Ray Serve keeps what was deployed; nothing of this process stays. What the nodes need of their own
is in their environment (see ``node``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.config import assemble
from cluster.config.schema import Config
from cluster.local.start_report import Began, Done, Failed, Note, Ready, Reporter
from cluster.models import models
from cluster.serve import fleet, node, ray_runtime
from cluster.serve.node import Place, fingerprint
from cluster.serve.replica_kinds import KINDS, Kind
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.launch_settings import Launch
from cluster.settings.worker_settings import without_password
from protocol.errors import StartupError
from protocol.registry.directory import Directory, RedisError, connect
from protocol.roles import ROLES
from protocol.security.cluster_token import check_bind
from router.settings import RouterSettings

if TYPE_CHECKING:
    from cluster.serve.applications import Layout

_REDIS_S = 5.0
_UNSAID = "127.0.0.1"  # the default of hosts


def up(wanted: Launch, model: str | None, address: str, routers: int | None) -> int:
    """Deploys, or updates what is there; 0 when it serves. What is wrong is told, and is 1.
    ``routers``: None for one on each node that takes any."""
    with Reporter() as report:
        stage = "check"
        try:
            report(Began(stage))
            launch = _named(wanted, model)
            with ray_runtime.connected(address):
                layout = _checked(launch, node.here(), report)
                if routers is None:
                    routers = sum(node.takes("router") for node in fleet.nodes())
                launch = msgspec.structs.replace(launch, routers=max(1, routers))
                report(Done(stage, f"a Ray cluster with {_shown(ray_runtime.declared())}"))
                stage = "deploy"
                report(Began(stage))
                ray_runtime.start_serve()
                launch = _as_left(launch, report)
                urls = _deployed(launch, layout, report)
                report(Done(stage, launch.counts))
        except StartupError as error:
            report(Failed(stage, str(error)))
            return 1
        for url in urls[1:]:
            report.say(f"router   {url}")
        report(Ready(urls[0], launch.model_id, launch.router.api_keys is not None))
    return 0


def _named(wanted: Launch, model: str | None) -> Launch:
    """The model as each node shall look for it. Raises StartupError where this one has no such."""
    found = models.locate(model)
    own_home = model is None or found.repo is not None or model.startswith("~")
    path = (model or "") if own_home else str(found.path)
    return msgspec.structs.replace(wanted, model_path=path, model_id=wanted.model_id or found.id)


def _checked(launch: Launch, own: Config, report: Reporter) -> Layout:
    """How the replicas will be laid out. Raises StartupError for what this node would refuse, since
    the others have the same of it."""
    from cluster.serve.applications import Layout, count

    wanted_hosts = {"worker.host": launch.workers["decode"].host, "router.host": launch.host}
    for key, host in wanted_hosts.items():
        if host != _UNSAID:
            raise StartupError(
                f"{key} is {host!r}, but on a cluster of hosts everybody listens on the address of"
                " its node: leave it out"
            )
    launch.check()
    address = ray_runtime.node_address()
    place = Place(None, launch.drain_s, fingerprint())
    _check_prometheus(launch.autoscaler, own)
    worker = node.worker(launch.workers["decode"], own, address)
    check_bind(address, tls=worker.tls is not None)
    node.router(launch.router, own, address).check_host(address)
    there = fleet.nodes()
    if worker.device is None:
        pools: list[Kind] = [kind for kind in ROLES if count(kind, launch)]
        there = fleet.wait_for(pools, launch.start_deadline_s, report)
    fleet.check_programs(there, place.program)
    gpus = any(each.resources.get("GPU") for each in there)
    return Layout(place, 1.0 if worker.device == "cuda" or (not worker.device and gpus) else 0.0)


def _check_prometheus(settings: AutoscalerSettings, own: Config) -> None:
    """Raises StartupError for a URL with a secret in it that nodes do not know."""
    url = settings.prometheus_url
    if settings.mode == "off" or url is None or without_password(url) == url:
        return
    if assemble.autoscaler(own).prometheus_url != url:
        raise StartupError(
            "autoscaler.prometheus_url has a password or options, and does not travel through Ray:"
            " give it to every node as BATON_AUTOSCALER_PROMETHEUS_URL (in node.env)"
        )


def _shown(resources: dict[str, float]) -> str:
    named = {k: v for k, v in sorted(resources.items()) if k.startswith("baton_") or k == "GPU"}
    return ", ".join(f"{v:g} {k}" for k, v in named.items()) or "no baton_ resources"


def _as_left(launch: Launch, report: Reporter) -> Launch:
    """With numbers of workers that are an autoscaler's, as it left them. Says so, and where other
    numbers are not those that run."""
    from cluster.serve import deploy
    from cluster.serve.applications import count

    asked = deploy.autoscaled() if launch.autoscaler.mode == "act" else {}
    if asked:
        launch = launch.with_workers(asked)
        shown = ", ".join(f"{count(role, launch)} {role}" for role in asked)
        report(Note(f"the autoscaler sees to the numbers of workers: {shown} stay"))
    for kind, running in deploy.replicas().items():
        if kind in KINDS and kind not in asked and running != count(kind, launch):
            report(Note(f"{kind}: {running} run, {count(kind, launch)} are configured"))
    return launch


def _deployed(launch: Launch, layout: Layout, report: Reporter) -> list[str]:
    """URLs of the routers."""
    from cluster.serve import deploy
    from cluster.serve.router_probe import Probe

    deploy.run(launch, layout, report)
    own = node.router(launch.router, node.here(), None)
    urls = asyncio.run(_routers(own))
    keys = own.api_keys is not None
    for url in urls:
        probe = Probe(url, own.http_tls)
        probe.answers(launch.model_id, launch.start_deadline_s, report, keys=keys)
    return urls


async def _routers(settings: RouterSettings) -> list[str]:
    client = connect(settings.redis_url)
    try:
        async with asyncio.timeout(_REDIS_S):
            records = await Directory(client, settings.cluster).routers.all()
    except (RedisError, OSError, TimeoutError) as error:
        raise StartupError(f"the routers run, but Redis does not say where: {error}") from error
    finally:
        await client.aclose()
    urls = sorted({record.url for record in records if record.url})
    if not urls:
        raise StartupError("the routers run, but Redis knows none of them")
    return urls


def down(address: str, say: Callable[[str], None]) -> int:
    """Drains what is deployed, and ends Serve. Raises StartupError."""
    from ray import serve

    with ray_runtime.connected(address):
        from cluster.serve import deploy

        there = deploy.deployed()
        if not there:
            say("nothing of Baton is deployed there")
            return 0
        say("draining: requests that run may finish")
        deploy.drain()
        end: Any = serve.shutdown
        end()
    say("drained and removed; the Ray cluster itself still runs (`ray down` ends it)")
    return 0

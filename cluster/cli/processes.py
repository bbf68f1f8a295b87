"""`baton worker`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.configured import failure, settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.settle import Flags

_NEEDS = ("redis.url", "security.token")


@configured(keys.WORKER - keys.of("pools"), {"worker.host": "--host"})
def worker(
    flags: Flags,
    role: Annotated[str, typer.Option(help="prefill or decode.")],
    port: Annotated[int, typer.Option(help="Control port; 0: any.")] = 0,
    kv_port: Annotated[int, typer.Option(help="KV port; 0: any.")] = 0,
    metrics_port: Annotated[int, typer.Option(help="Metrics port; 0: any.")] = 0,
) -> None:
    """Run one worker in the foreground, without Ray. Its token comes from BATON_TOKEN."""
    config = settled(flags, keys.WORKER, _NEEDS).config
    import msgspec

    from cluster.config import assemble
    from cluster.doctor.subject import of_worker
    from cluster.launch import standalone
    from cluster.launch.prepare import prepare
    from cluster.local.start_report import on_stderr
    from cluster.models import drafting
    from cluster.settings.worker_settings import engine_of
    from protocol.errors import StartupError
    from protocol.roles import as_role

    ports = {"port": port, "kv_port": kv_port, "metrics_port": metrics_port}
    try:
        settings = assemble.worker(config, as_role(role), **ports)
        wanted = of_worker(settings, config.model.path)
        with on_stderr() as report:
            found = prepare(wanted, config.model.id, report, [settings.check])
            drafts = drafting.resolve(engine_of(settings).speculation, config.model.path, report)
        settings = msgspec.structs.replace(
            settings, model_path=str(found.path), model_id=found.id, speculation=drafts
        )
        raise typer.Exit(standalone.run_worker(settings, config.drain_s))
    except StartupError as e:
        raise failure(e) from None


# MERGED cluster.commands.router
# `baton router`.

_NEEDS_router = ("redis.url", "security.token", "security.secret")
_FLAGS = {"router.metrics_host": "--metrics-host", "router.metrics_port": "--metrics-port"}


@configured(keys.ROUTER, _FLAGS)
def router(flags: Flags) -> None:
    """Run one router in the foreground, without Ray. Needs BATON_TOKEN and BATON_SECRET."""
    config = settled(flags, keys.ROUTER, _NEEDS_router).config
    import msgspec

    from cluster.config import assemble
    from cluster.doctor.subject import of_router
    from cluster.launch.prepare import prepare
    from cluster.local.start_report import on_stderr
    from protocol.errors import StartupError
    from router.http.server import run_router

    try:
        settings = assemble.router(config)
        checks = [settings.check, lambda: settings.check_host(config.router.host)]
        wanted = of_router(settings, config.model.path, config.router.host, config.router.port)
        with on_stderr() as report:
            found = prepare(wanted, config.model.id, report, checks)
        settings = msgspec.structs.replace(settings, model_path=str(found.path), model_id=found.id)
        served = config.router
        raise typer.Exit(run_router(settings, served.host, served.port, config.drain_s))
    except StartupError as e:
        raise failure(e) from None


# MERGED cluster.commands.autoscale
# `baton autoscale`.


@configured(keys.AUTOSCALE)
def autoscale(
    flags: Flags,
    advise: Annotated[
        bool, typer.Option("--advise", help="Only say what would be done, whatever the mode is.")
    ] = False,
    metrics_host: Annotated[str, typer.Option(help="Address of its own metrics.")] = "127.0.0.1",
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of its own metrics; 0: any.")
    ] = 0,
) -> None:
    """Run the autoscaler in the foreground, without Ray: it lends workers from one pool to the
    other, and says what else it wants. Needs BATON_TOKEN."""
    config = settled(flags, keys.AUTOSCALE, _NEEDS).config
    import msgspec

    from cluster.config import assemble
    from cluster.launch import standalone
    from protocol.errors import StartupError

    settings = assemble.autoscaler(config)
    if settings.mode == "off":
        typer.echo("autoscaler.mode is off: it advises; --autoscaler-mode act has it lend workers")
    settings = msgspec.structs.replace(
        settings,
        mode="act" if settings.mode == "act" and not advise else "advise",
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    try:
        raise typer.Exit(standalone.run_autoscaler(settings))
    except StartupError as e:
        raise failure(e) from None

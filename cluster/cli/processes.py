"""`baton worker`, `baton router` and `baton autoscale`: one process without Ray."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.common import load_config, report_failure
from cluster.config import keys
from cluster.config.flags import with_config_flags
from cluster.config.resolve import CommandFlags

_NEEDS = ("redis.url", "security.token")


@with_config_flags(keys.WORKER_KEYS - keys.select_keys("pools"), {"worker.host": "--host"})
def worker(
    flags: CommandFlags,
    role: Annotated[str, typer.Option(help="prefill or decode.")],
    port: Annotated[int, typer.Option(help="Control port; 0: any free port.")] = 0,
    kv_port: Annotated[int, typer.Option(help="Port of KV over gRPC; 0: any free port.")] = 0,
    kv_tcp_port: Annotated[int, typer.Option(help="Port of KV over TCP; 0: any free port.")] = 0,
    metrics_port: Annotated[int, typer.Option(help="Metrics port; 0: any free port.")] = 0,
) -> None:
    """Run one worker in the foreground, without Ray. Its token comes from BATON_TOKEN."""
    config = load_config(flags, keys.WORKER_KEYS, _NEEDS).config
    from cluster.config import assemble
    from cluster.doctor.subject import worker_subject
    from cluster.launch import standalone
    from cluster.launch.prepare import check_and_fetch_model
    from cluster.local.start_report import stderr_reporter
    from cluster.models import drafting
    from protocol.errors import StartupError
    from protocol.roles import parse_role

    ports = {"port": port, "kv_port": kv_port}
    ports |= {"kv_tcp_port": kv_tcp_port, "metrics_port": metrics_port}
    try:
        settings = assemble.worker_settings(config, parse_role(role), **ports)
        subject = worker_subject(settings, config.model.path)
        with stderr_reporter() as report:
            found = check_and_fetch_model(subject, config.model.id, report, [settings.check])
            drafts = drafting.resolve_draft(settings.engine.speculation, config.model.path, report)
        settings = settings.with_model(str(found.path), found.id, speculation=drafts)
        raise typer.Exit(standalone.run_worker(settings, config.drain_s))
    except StartupError as e:
        raise report_failure(e) from None


_ROUTER_FLAGS = {"router.metrics_host": "--metrics-host", "router.metrics_port": "--metrics-port"}


@with_config_flags(keys.ROUTER_KEYS, _ROUTER_FLAGS)
def router(flags: CommandFlags) -> None:
    """Run one router in the foreground, without Ray. Needs BATON_TOKEN and BATON_SECRET."""
    config = load_config(flags, keys.ROUTER_KEYS, (*_NEEDS, "security.secret")).config
    import msgspec

    from cluster.config import assemble
    from cluster.doctor.subject import router_subject
    from cluster.launch.prepare import check_and_fetch_model
    from cluster.local.start_report import stderr_reporter
    from protocol.errors import StartupError
    from router.http.server import run_router

    try:
        settings = assemble.router_settings(config)
        checks = [settings.check, lambda: settings.check_host(config.router.host)]
        subject = router_subject(
            settings, config.model.path, config.router.host, config.router.port
        )
        with stderr_reporter() as report:
            found = check_and_fetch_model(subject, config.model.id, report, checks)
        settings = msgspec.structs.replace(settings, model_path=str(found.path), model_id=found.id)
        served = config.router
        raise typer.Exit(run_router(settings, served.host, served.port, config.drain_s))
    except StartupError as e:
        raise report_failure(e) from None


@with_config_flags(keys.AUTOSCALE_KEYS)
def autoscale(
    flags: CommandFlags,
    advise: Annotated[
        bool,
        typer.Option("--advise", help="Only report decisions, whatever the configured mode is."),
    ] = False,
    metrics_host: Annotated[
        str, typer.Option(help="Address of the autoscaler's own metrics.")
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port of the autoscaler's own metrics; 0: any free port."
        ),
    ] = 0,
) -> None:
    """Run the autoscaler in the foreground, without Ray: it lends workers from one pool to the
    other, and reports what else it wants. Needs BATON_TOKEN."""
    config = load_config(flags, keys.AUTOSCALE_KEYS, _NEEDS).config
    import msgspec

    from cluster.config import assemble
    from cluster.launch import standalone
    from protocol.errors import StartupError

    settings = assemble.autoscaler_settings(config)
    if settings.mode == "off":
        typer.echo(
            "autoscaler.mode is off, so decisions are only reported; --autoscaler-mode act"
            " carries them out"
        )
    settings = msgspec.structs.replace(
        settings,
        mode="act" if settings.mode == "act" and not advise else "advise",
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    try:
        raise typer.Exit(standalone.run_autoscaler(settings))
    except StartupError as e:
        raise report_failure(e) from None

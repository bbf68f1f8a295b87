"""`baton router`."""

from __future__ import annotations

import typer

from cluster.commands.failing import failure
from cluster.commands.settling import settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.layers import Flags

_NEEDS = ("redis.url", "security.token", "security.secret")
_FLAGS = {"router.metrics_host": "--metrics-host", "router.metrics_port": "--metrics-port"}


@configured(keys.ROUTER, _FLAGS)
def router(flags: Flags) -> None:
    """Run one router in the foreground, without Ray. Needs BATON_TOKEN and BATON_SECRET."""
    config = settled(flags, keys.ROUTER, _NEEDS).config
    import msgspec

    from cluster.config import assemble
    from cluster.doctor.wanted import of_router
    from cluster.http_server import run_router
    from cluster.prepare import prepare
    from cluster.report import on_stderr
    from protocol.errors import StartupError

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

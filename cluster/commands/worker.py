"""`baton worker`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.failing import failure
from cluster.commands.settling import settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.layers import Flags

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

    from cluster import drafting, standalone
    from cluster.config import assemble
    from cluster.doctor.wanted import of_worker
    from cluster.prepare import prepare
    from cluster.report import on_stderr
    from cluster.settings import engine_of
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

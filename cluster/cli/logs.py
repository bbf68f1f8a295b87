"""`baton logs` and `baton ls`: the logs of a cluster, on this machine or on the nodes of a Ray
cluster, and the clusters that run here."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from cluster.cli.common import load_config, report_failure
from cluster.config import keys
from cluster.config.flags import with_config_flags
from cluster.config.resolve import CommandFlags
from cluster.local.kept_logs import find_logs
from cluster.local.log_tail import LogLines, LogTail, match_logs, unknown_source_text
from cluster.local.progress_text import progress_text
from cluster.local.run_state import ClusterHome, others_text, running_clusters
from cluster.local.start_snippets import baton_command
from protocol.errors import StartupError, UsageError

PROGRESS = "progress.log"
_POLL_S = 0.3
_KEYS = keys.select_keys("cluster")


def ls() -> None:
    """List the clusters of this user that run on this machine."""
    found = running_clusters()
    for name, state in found:
        doing = "" if state.ready else "  starting or stopping"
        typer.echo(f"{name}  {state.url}  {state.model_id}{doing}")
    if not found:
        typer.echo("no cluster of this user runs on this machine")


@with_config_flags(_KEYS)
def logs(
    flags: CommandFlags,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="WORKER|ROUTER",
            help="prefill, decode, router, autoscaler, supervisor, controller, progress, redis,"
            " decisions, the pid of a process, or the id of a worker as `baton status` shows it.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, help="Last lines of each log to print.")
    ] = 100,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="Print the logs of replicas on all nodes of this Ray cluster;"
            " `auto` on one of its nodes.",
        ),
    ] = None,
) -> None:
    """Print the logs of the cluster on this machine, or those of its last run; or those of replicas
    on all nodes of a Ray cluster."""
    cluster = load_config(flags, _KEYS).config.cluster
    try:
        with contextlib.suppress(KeyboardInterrupt):
            if address is not None:
                _print_logs_of_nodes(address, source, lines, follow=follow)
            else:
                _print_local_logs(cluster, source, lines, follow=follow)
    except StartupError as e:
        raise report_failure(e) from None


def _print_local_logs(cluster: str, source: str | None, lines: int, *, follow: bool) -> None:
    source = _check_source(cluster_logs(cluster), source, cluster)
    tail = LogTail(lambda: match_logs(cluster_logs(cluster), source))
    shown = tail.last_lines(lines)
    _print_lines(shown, many=tail.count > 1)
    if source is not None and not follow and not any(shown.values()):
        typer.echo(f"baton: nothing was written to {', '.join(shown)}", err=True)
    while follow:
        time.sleep(_POLL_S)
        shown = tail.new_lines()
        _print_lines(shown, many=tail.count > 1)


def _print_logs_of_nodes(address: str, source: str | None, lines: int, *, follow: bool) -> None:
    from cluster.serve import node_logs, ray_runtime

    with ray_runtime.connected_to_ray(address):
        for node, answer in node_logs.read_logs(node_logs.LogQuery(source, lines, follow)):
            _print_lines(answer.lines, many=True, node=f"{node} ")


def cluster_logs(cluster: str) -> dict[str, Path]:
    """Return the logs of a cluster by name: of its run, or of the last one if it does not run."""
    home = ClusterHome(cluster)
    state = home.read() if home.running() else None
    own = {"supervisor.log": home.log, PROGRESS: home.events}
    found = {name: path for name, path in own.items() if path.is_file()}
    if state is not None:
        return found | find_logs(Path(state.run_dir))
    kept: list[Path] = []
    with contextlib.suppress(OSError):  # there are none, or they are being replaced
        kept = sorted(home.kept_logs.iterdir())
    return found | {path.name: path for path in kept}


def _check_source(found: dict[str, Path], source: str | None, cluster: str) -> str | None:
    """Return the source whose logs are printed: for an engine, which has no log of its own, the
    process that started it. Raises StartupError where there are no logs, and UsageError for a
    source that none has."""
    if not found:
        raise StartupError(
            f"cluster {cluster!r} has no logs here{others_text(cluster)}: `baton ls` lists the"
            f" clusters that run, and `{baton_command('up', cluster)}` starts this one"
        )
    if match_logs(found, source):
        return source
    parent = _parent_of(source or "")
    if parent is not None and match_logs(found, parent):
        return parent
    if source in ("decisions", "autoscaler"):
        raise StartupError(_no_decisions_text(source, found))
    raise UsageError(unknown_source_text(source, found))


def _no_decisions_text(source: str, found: dict[str, Path]) -> str:
    if match_logs(found, "autoscaler"):
        return "no decision is written yet, or the key autoscaler.log names another file"
    return f"there is no log {source!r}: the autoscaler is off (autoscaler.mode is off)"


def _parent_of(pid: str) -> str | None:
    if not pid.isdecimal() or len(pid) > 9:
        return None
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(int(pid)).ppid())
    return None


def _print_lines(shown: LogLines, *, many: bool, node: str = "") -> None:
    """Print lines; where they are of several logs, each with the name of its own."""
    for name, lines in shown.items():
        prefix = f"{node}{name.removesuffix('.log')}: " if many else ""
        for line in lines:
            text = progress_text(line) if name == PROGRESS else line.decode(errors="replace")
            if text is not None:
                typer.echo(f"{prefix}{text}")

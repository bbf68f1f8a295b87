"""`baton logs` and `baton ls`: the logs of a cluster on this machine, and the clusters that run."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.common import load_config, report_failure
from cluster.config import keys
from cluster.config.flags import with_config_flags
from cluster.config.resolve import CommandFlags
from cluster.local.kept_logs import MAX_BYTES, find_logs, read_end, without_headers
from cluster.local.run_state import ClusterHome, others_text, running_clusters
from protocol.errors import StartupError, UsageError

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
) -> None:
    """Print the logs of the cluster on this machine, or those of its last run."""
    cluster = load_config(flags, _KEYS).config.cluster
    try:
        found = select_logs(cluster_logs(cluster), source, cluster)
    except StartupError as e:
        raise report_failure(e) from None
    ends = {}
    for name, path in found.items():
        ends[path] = path.stat().st_size
        shown = without_headers(read_end(path, MAX_BYTES))[-lines:]
        _print_lines(name, shown, many=len(found) > 1)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(cluster, source, ends)


def cluster_logs(cluster: str) -> dict[str, Path]:
    """Return the logs of a cluster by name: of its run, or of the last one if it does not run."""
    home = ClusterHome(cluster)
    state = home.read() if home.running() else None
    own = {"supervisor.log": home.log, "progress.log": home.events}
    found = {name: path for name, path in own.items() if path.is_file()}
    if state is not None:
        return found | find_logs(Path(state.run_dir))
    kept = sorted(home.kept_logs.iterdir()) if home.kept_logs.is_dir() else []
    return found | {path.name: path for path in kept}


def select_logs(found: dict[str, Path], source: str | None, cluster: str) -> dict[str, Path]:
    """Return the logs that ``source`` names: by kind, by pid, or by an id that they contain.

    Raises StartupError where there are no logs, and UsageError for a source that none has."""
    if not found:
        raise StartupError(f"cluster {cluster!r} has no logs here{others_text(cluster)}")
    if source is None:
        return found
    chosen = {n: p for n, p in found.items() if source in n.removesuffix(".log").split("-")}
    chosen = chosen or {n: p for n, p in found.items() if n.startswith(f"{source}.")}
    if not chosen and len(source) >= 6:
        chosen = {n: p for n, p in found.items() if source.encode() in read_end(p, MAX_BYTES)}
    if not chosen:
        raise UsageError(f"no log is of {source!r}; there are {', '.join(found)}")
    return chosen


def _print_lines(name: str, shown: list[bytes], *, many: bool) -> None:
    prefix = f"{name.removesuffix('.log')}: " if many else ""
    for line in shown:
        typer.echo(f"{prefix}{line.decode(errors='replace')}")


def _follow(cluster: str, source: str | None, ends: dict[Path, int]) -> None:
    """Print what is appended to the logs, also to those of processes that start later."""
    while True:
        time.sleep(_POLL_S)
        found = cluster_logs(cluster)
        with contextlib.suppress(StartupError):
            found = select_logs(found, source, cluster)
            for name, path in found.items():
                _print_lines(name, _new_lines(path, ends), many=len(found) > 1)


def _new_lines(path: Path, ends: dict[Path, int]) -> list[bytes]:
    """Return the whole lines after the end that is known, and advance it."""
    try:
        with path.open("rb") as stream:
            stream.seek(ends.get(path, 0))
            text = stream.read(MAX_BYTES)
    except OSError:
        return []
    whole = text[: text.rfind(b"\n") + 1]
    ends[path] = ends.get(path, 0) + len(whole)
    return without_headers(whole)

"""`baton up` while the cluster runs on this machine: replaces what changed, one replica at a time.

    launch.json of the run --fixed settings differ--> refused, with what differs
                           --else--> Serve replaces the kinds of replicas whose arguments changed

The new replica of a kind starts first; the old one drains, so that its streams run to their end or
continue on another worker. The supervisor of the run goes on as before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from cluster.doctor.checks import update_checks
from cluster.doctor.subject import cluster_subject
from cluster.launch.prepare import check_and_fetch_model
from cluster.launch.update_changes import changed_settings, shorten_changes
from cluster.launch.worker_memory import update_room
from cluster.local.run_state import ClusterHome, RunState
from cluster.local.start_report import (
    ClusterReady,
    StageDone,
    StageFailed,
    StageStarted,
    StartReporter,
)
from cluster.local.start_snippets import baton_command
from cluster.models import drafting
from cluster.serve import node_settings, ray_runtime, scale
from cluster.serve.node_settings import ReplicaContext, program_fingerprint
from cluster.serve.replica_kinds import ALL_KINDS, SCALABLE_KINDS, ReplicaKind, option_name
from cluster.serve.router_probe import RouterProbe
from cluster.serve.scale import Confirm
from cluster.settings.launch_settings import LaunchSettings, read_launch, share_of_gpu
from protocol.errors import StartupError

if TYPE_CHECKING:
    from cluster.serve.applications import ReplicaLayout


def update_cluster(
    home: ClusterHome,
    state: RunState,
    wanted: LaunchSettings,
    model: str | None,
    report: StartReporter,
    confirm: Confirm,
    *,
    port_moves: bool,
) -> int:
    """Update the running cluster; return the exit status. ``port_moves``: no port was given, so
    that of the cluster stays. ``confirm`` asks about large jumps. Errors are printed."""
    stage = "check"
    try:
        report(StageStarted(stage))
        before = read_launch(Path(state.run_dir) / "launch.json")
        launch = _check_settings(before, wanted, model, report, keep_port=port_moves)
        with _connected(state):
            launch = _keep_counts(launch, report)
            layout, replaced = _find_changes(before, launch, state.program)
            report.close()  # a question must not mix with the spinner
            lines = _check_nodes(before, launch, layout, replaced, confirm)
            report(StageDone(stage, f"cluster {home.cluster!r} runs at {state.url}; updating it"))
            for line in lines or ["nothing has changed"]:
                report.say(f"         {line}")
            stage = "deploy"
            report(StageStarted(stage))
            _deploy(launch, layout, replaced, report)
        launch.write()
        found = {"url": launch.url, "model_id": launch.model_id, "ca": launch.https_ca}
        home.write(replace(state, **found, program=program_fingerprint()))
        report(StageDone(stage, launch.counts))
    except StartupError as error:
        report(StageFailed(stage, str(error)))
        return error.exit_status
    keys = launch.router.api_keys is not None
    report(ClusterReady(launch.url, launch.model_id, keys, launch.https_ca, launch.cluster))
    return 0


def _check_settings(
    before: LaunchSettings,
    wanted: LaunchSettings,
    model: str | None,
    report: StartReporter,
    *,
    keep_port: bool,
) -> LaunchSettings:
    """Run the checks of a start that an update depends on; return the settings to deploy in the
    folder of the run. Raises StartupError."""
    port = before.port if keep_port else wanted.port
    if changed := fixed_differences(before, replace(wanted, port=port)):
        raise StartupError(
            f"{', '.join(changed)} cannot change while the cluster runs: stop it with"
            f" `{baton_command('down', wanted.cluster)}` first, and start it again"
        )
    subject = cluster_subject(wanted, model, port_moves=True)
    settings = (wanted.check, lambda: wanted.router.check_host(wanted.host))
    found = check_and_fetch_model(
        subject, wanted.model_id or None, report, settings, update_checks()
    )
    decode = wanted.workers["decode"]
    drafts = drafting.resolve_draft(decode.engine.speculation, model, report)
    drafting_decode = decode.with_model("", decode.model_id, speculation=drafts)
    return replace(
        wanted,
        model_path=str(found.path),
        model_id=found.id,
        run_dir=before.run_dir,
        events_path=before.events_path,
        port=port,
        workers={**wanted.workers, "decode": drafting_decode},
    )


def fixed_differences(before: LaunchSettings, after: LaunchSettings) -> list[str]:
    """Return the variables and keys that differ and that only a new start can change: where the
    routers listen, and what the processes of the run have in their environment."""
    values = [
        node_settings.node_environment(
            each, each.redis_url or "", each.token or "", each.secret or ""
        )
        | {"router.host": each.host, "router.port": str(each.port)}
        for each in (before, after)
    ]
    return sorted(name for name in values[0] if values[0][name] != values[1][name])


@contextlib.contextmanager
def _connected(state: RunState) -> Iterator[None]:
    assert state.ray_address is not None  # the cluster is ready
    ray_runtime.join_environment(Path(state.run_dir))
    with ray_runtime.connected_to_ray(state.ray_address):
        import ray.serve  # noqa: F401  # reads the environment, and sets the level of its logger

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield


def _keep_counts(launch: LaunchSettings, report: StartReporter) -> LaunchSettings:
    from cluster.serve.external_cluster import keep_autoscaled_counts

    return keep_autoscaled_counts(launch, report)


def _find_changes(
    before: LaunchSettings, launch: LaunchSettings, program: str
) -> tuple[ReplicaLayout, dict[ReplicaKind, list[str]]]:
    """Return the layout of the replicas, and for each kind that is replaced why. ``program``:
    fingerprint of the one that deployed the cluster."""
    from cluster.serve.applications import ReplicaLayout

    gpus = 0 if launch.workers["decode"].engine.device == "cpu" else ray_runtime.gpu_count()
    old, new = (share_of_gpu(gpus, each.most_workers(gpus)) for each in (before, launch))
    context = ReplicaContext(launch.events_path, launch.drain_s, program_fingerprint())
    changes = changed_settings(before, launch, (old, new))
    if program != context.program:
        for kind in ALL_KINDS:
            changes.setdefault(kind, []).append("another version of Baton")
    return ReplicaLayout(context, new), changes


def _check_nodes(
    before: LaunchSettings,
    launch: LaunchSettings,
    layout: ReplicaLayout,
    replaced: Mapping[ReplicaKind, list[str]],
    confirm: Confirm,
) -> list[str]:
    """Check that the replicas of the update fit, as `baton scale` does; return a line for each
    thing that changes. Raises StartupError."""
    from cluster.serve import deploy
    from cluster.serve.applications import configured_replicas
    from cluster.serve.external_cluster import count_changes

    running = deploy.running_replicas()
    counts = {kind: configured_replicas(kind, launch) for kind in SCALABLE_KINDS}
    staying = {kind: n for kind, n in running.items() if kind not in replaced}
    room = partial(update_room, before, launch, running, replaced)
    scale.check_room(staying, counts, layout.gpus, room)
    scale.confirm_large_jumps(running, counts, confirm)
    return count_changes(launch, running) + [
        f"{option_name(kind)}: replaced, {shorten_changes(why)}"
        for kind, why in replaced.items()
        if running.get(kind) and configured_replicas(kind, launch)
    ]


def _deploy(
    launch: LaunchSettings,
    layout: ReplicaLayout,
    replaced: Collection[ReplicaKind],
    report: StartReporter,
) -> None:
    from cluster.serve import deploy

    deploy.deploy_cluster(launch, layout, report, replaced)
    wait = partial(RouterProbe(launch.url, launch.router.http_tls).wait_until_answering, keys=True)
    wait(launch.model_id, launch.start_deadline_s, report)

"""`baton up` while the cluster runs on this machine: replaces what changed, one replica at a time.

    launch.json of the run --fixed settings differ--> refused, with what differs
                           --else--> Serve replaces the kinds of replicas whose arguments changed

The new replica of a kind starts first; the old one drains, so that its streams run to their end or
continue on another worker. The supervisor of the run goes on as before.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from cluster.local.run_state import ClusterHome, RunState
from cluster.local.start_report import (
    ClusterReady,
    StageDone,
    StageFailed,
    StageStarted,
    StartReporter,
)
from cluster.models import drafting, locate
from cluster.serve import node_settings, ray_runtime
from cluster.serve.node_settings import ReplicaContext, program_fingerprint
from cluster.serve.router_probe import RouterProbe
from cluster.settings.launch_settings import LaunchSettings, read_launch, share_of_gpu
from protocol.errors import StartupError


def update_cluster(
    home: ClusterHome,
    state: RunState,
    wanted: LaunchSettings,
    model: str | None,
    report: StartReporter,
    *,
    port_moves: bool,
) -> int:
    """Update the running cluster; return the exit status. ``port_moves``: no port was given, so
    that of the cluster stays. Errors are printed."""
    stage = "check"
    try:
        report(StageStarted(stage))
        launch = _checked(state, wanted, model, report, keep_port=port_moves)
        report(StageDone(stage, f"cluster {home.cluster!r} runs at {state.url}; updating it"))
        stage = "deploy"
        report(StageStarted(stage))
        _deploy(state, launch, report)
        launch.write()
        home.write(replace(state, url=launch.url, model_id=launch.model_id, ca=launch.https_ca))
        report(StageDone(stage, launch.counts))
    except StartupError as error:
        report(StageFailed(stage, str(error)))
        return 1
    keys = launch.router.api_keys is not None
    report(ClusterReady(launch.url, launch.model_id, keys, launch.https_ca, launch.cluster))
    return 0


def _checked(
    state: RunState,
    wanted: LaunchSettings,
    model: str | None,
    report: StartReporter,
    *,
    keep_port: bool,
) -> LaunchSettings:
    """Return the settings to deploy in the folder of the run. Raises StartupError."""
    before = read_launch(Path(state.run_dir) / "launch.json")
    wanted.check()
    wanted.router.check_host(wanted.host)
    found = locate.resolve_model(model, wanted.model_id or None, report.download)
    decode = wanted.workers["decode"]
    drafts = drafting.resolve_draft(decode.engine.speculation, model, report)
    drafting_decode = decode.with_model("", decode.model_id, speculation=drafts)
    launch = replace(
        wanted,
        model_path=str(found.path),
        model_id=found.id,
        run_dir=before.run_dir,
        events_path=before.events_path,
        port=before.port if keep_port else wanted.port,
        workers={**wanted.workers, "decode": drafting_decode},
    )
    if changed := fixed_differences(before, launch):
        raise StartupError(
            f"{', '.join(changed)} cannot change while the cluster runs: stop it with `baton down`"
            " first, and start it again"
        )
    return launch


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


def _deploy(state: RunState, launch: LaunchSettings, report: StartReporter) -> None:
    assert state.ray_address is not None
    ray_runtime.join_environment(Path(state.run_dir))
    with ray_runtime.connected_to_ray(state.ray_address):
        # These modules import Serve, which reads the environment when it is imported.
        from cluster.serve import applications, deploy
        from cluster.serve.external_cluster import keep_autoscaled_counts

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        launch = keep_autoscaled_counts(launch, report)
        gpus = 0 if launch.workers["decode"].engine.device == "cpu" else ray_runtime.gpu_count()
        share = share_of_gpu(gpus, launch.most_workers(gpus))
        context = ReplicaContext(launch.events_path, launch.drain_s, program_fingerprint())
        layout = applications.ReplicaLayout(context, share)
        deploy.deploy_cluster(launch, layout, report)
    wait = partial(RouterProbe(launch.url, launch.router.http_tls).wait_until_answering, keys=True)
    wait(launch.model_id, launch.start_deadline_s, report)

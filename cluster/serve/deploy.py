"""Deploys Baton's applications on Serve, waits until they run, updates, drains and deletes them.

The supervisor of `baton up` and ``external_cluster`` call this module, in a process that is a
driver of the Ray cluster; ``scale`` uses its view of what runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster.local.start_report import ReportWaiting, WaitReporter
from cluster.serve import applications, ray_internals, ray_runtime
from cluster.serve.applications import ReplicaLayout
from cluster.serve.bounded_call import CONTROLLER_S, call_within
from cluster.serve.replica_kinds import (
    ACTING_AUTOSCALER,
    ALL_KINDS,
    SCALABLE_KINDS,
    ReplicaKind,
    application_name,
    resource_name,
)
from cluster.serve.replicas import KILL_S
from cluster.serve.scale_limits import update_deadline
from cluster.settings.launch_settings import LaunchSettings
from protocol.errors import StartupError
from protocol.roles import ROLES, Role

_POLL_S = 0.25
_STATUS_POLL_S = 0.5  # each status takes 0.03 s of CPU time here, and more in the controller
_START_ORDER: tuple[ReplicaKind, ...] = ("decode", "prefill", "router")
"""Kinds that start together. Decode workers load longest: they measure what drafts cost."""
_DELETE_MARGIN_S = 30.0
_MAX_FAILED_STARTS = 2
_RETRYING = re.compile(r"replica failed to start.* Retrying (\d+) more time")
_CAUSES = ("StartupError: ", "EngineDied: ", "Error: ")


def deploy_cluster(
    launch: LaunchSettings,
    layout: ReplicaLayout,
    report: ReportWaiting,
    replaced: Collection[ReplicaKind] = ALL_KINDS,
) -> None:
    """Deploy or update all applications, and return when every replica runs.

    ``replaced``: the running kinds that may get other settings.

    An update replaces one kind after the other. New replicas start first where nodes have free
    slots; otherwise Serve stops a fifth of the old ones at a time.

    Raises StartupError with the error of a replica, or with what is missing at the deadline.
    """
    wanted = [kind for kind in ALL_KINDS if applications.configured_replicas(kind, launch)]
    if launch.autoscaler.mode != "act" and is_autoscaler_acting():
        _delete({"autoscaler"})  # it would change replica counts while they are being set
    running = running_replicas()
    for kind in running.keys() - set(wanted):
        _delete_application(kind)
    pools = [kind for kind in _START_ORDER if kind in wanted]
    others = [kind for kind in wanted if kind not in SCALABLE_KINDS]
    for kinds in [[kind] for kind in wanted] if running else filter(None, [pools, others]):
        surges = {kind: _surge(kind, running.get(kind, 0), layout.gpus) for kind in kinds}
        if layout.context.events_path is not None:  # one machine: memory and cores are shared
            surges = {kind: min(surge, 1) for kind, surge in surges.items()}
        targets = [_run_target(kind, launch, layout, surges[kind]) for kind in kinds]
        call_within(launch.start_deadline_s, "Ray Serve", partial(_run_all, targets))
        counts = {kind: applications.configured_replicas(kind, launch) for kind in kinds}
        old = {kind: n for kind, n in running.items() if kind in kinds}
        times = launch.start_deadline_s, launch.drain_s + KILL_S
        deadline_s, why = update_deadline(times, old, counts, surges, replaced)
        wait_until_running(kinds, deadline_s, report, why)
        if running:
            _apply_counts(kinds, launch, report)


def _surge(kind: ReplicaKind, running: int, gpus: float) -> int:
    """Return how many more replicas of the kind fit on the living nodes, by slots and GPUs."""
    if kind not in SCALABLE_KINDS:
        return 0
    slots = ray_runtime.declared_resources().get(resource_name(kind), 0) - running
    if kind != "router" and gpus:
        slots = min(slots, ray_runtime.available_resources().get("GPU", 0) / gpus)
    return max(0, int(slots))


def _apply_counts(
    kinds: Sequence[ReplicaKind], launch: LaunchSettings, report: ReportWaiting
) -> None:
    """Set the configured numbers where `baton scale` has set others: Serve keeps those of an
    application that is deployed again without a change."""
    targets = target_replicas()
    counts = {
        kind: applications.configured_replicas(kind, launch)
        for kind in kinds
        if kind in SCALABLE_KINDS and (kind == "router" or launch.autoscaler.mode != "act")
    }
    changed = {kind: n for kind, n in counts.items() if targets.get(kind, n) != n}
    for kind, number in changed.items():
        set_target_replicas(kind, number)
    if changed:
        deadline_s = launch.start_deadline_s + launch.drain_s + KILL_S
        wait_until_running(list(changed), deadline_s, report, counts=changed)


def _run_all(targets: list[serve.RunTarget]) -> None:
    serve.run_many(
        targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )


def serve_applications(
    deadline_s: float = CONTROLLER_S,
) -> dict[str, ApplicationStatusOverview]:
    """Return the status of each application. Raises StartupError where Serve does not answer."""
    return call_within(deadline_s, "Ray Serve", lambda: serve.status().applications)


def deployed_kinds() -> set[ReplicaKind]:
    """Return the kinds that have an application in Serve."""
    found = serve_applications()
    return {kind for kind in ALL_KINDS if application_name(kind) in found}


def is_autoscaler_acting() -> bool:
    """Return whether a deployed autoscaler sets the numbers of workers."""
    overview = serve_applications().get(application_name("autoscaler"))
    ending = (ApplicationStatus.DELETING, ApplicationStatus.NOT_STARTED)
    return (
        overview is not None
        and overview.status not in ending
        and ACTING_AUTOSCALER in overview.deployments
    )


def autoscaler_targets() -> dict[Role, int]:
    """Return the numbers of workers that the autoscaler has set; empty when none acts."""
    if not is_autoscaler_acting():
        return {}
    targets = target_replicas()
    return {role: targets[role] for role in ROLES if role in targets}


def target_replicas(deadline_s: float = CONTROLLER_S) -> dict[ReplicaKind, int]:
    """Return the number of replicas that Serve is to run of each deployed kind."""
    read = partial(ray_internals.target_replicas, deadline_s)
    return call_within(deadline_s, "Ray Serve", read)


def set_target_replicas(kind: ReplicaKind, count: int) -> None:
    """Set the number of replicas that Serve is to run of a kind, and do not wait for them."""
    write = partial(ray_internals.set_target_replicas, kind, count, CONTROLLER_S)
    call_within(CONTROLLER_S, "Ray Serve", write)


def _run_target(
    kind: ReplicaKind, launch: LaunchSettings, layout: ReplicaLayout, surge: int
) -> serve.RunTarget:
    return serve.RunTarget(
        target=applications.build_application(kind, launch, layout, surge),
        name=application_name(kind),
        route_prefix=None,
        logging_config=ray_runtime.serve_logging_config(),
        external_scaler_enabled=True,
    )


def wait_until_running(
    kinds: Sequence[ReplicaKind],
    deadline_s: float,
    report: ReportWaiting,
    why: str = "",
    counts: Mapping[ReplicaKind, int] | None = None,
) -> None:
    """Return when all replicas of ``kinds`` run, in the numbers of ``counts`` if it is given.

    ``why`` explains the deadline. Raises StartupError with the error of a replica, or with what is
    missing at the deadline."""
    end = time.monotonic() + deadline_s
    wait_reporter = WaitReporter(report, end, why)
    failed_starts = FailedStarts()
    while True:
        found = serve_applications(max(CONTROLLER_S, end - time.monotonic()))
        present = count_running(found)
        waiting = []
        for kind in kinds:
            overview = found.get(application_name(kind))
            short = counts is not None and counts[kind] != present.get(kind)
            if overview is None or overview.status != ApplicationStatus.RUNNING or short:
                waiting.append(kind)
            if overview is None:
                continue
            failed_starts.check(kind, overview)
        if not waiting:
            return
        if time.monotonic() > end:
            names, slots = ", ".join(waiting), declared_slots(waiting)
            raise StartupError(f"still waiting for {names} after {deadline_s:.0f} s{slots}")
        wait_reporter(waiting)
        time.sleep(_STATUS_POLL_S)


def declared_slots(kinds: Sequence[ReplicaKind]) -> str:
    """Return a clause with the slots that nodes declare for ``kinds``: too few may be the cause."""
    declared = ray_runtime.declared_resources()
    names = [resource_name(kind) for kind in kinds if kind in SCALABLE_KINDS]
    shown = [f"{declared.get(name, 0):.0f} {name}" for name in names]
    return f"; the cluster's nodes declare {', '.join(shown)}" if shown else ""


class FailedStarts:
    """Counts the failed starts of each kind during one wait; a wait loop makes one."""

    def __init__(self) -> None:
        self._seen: set[tuple[ReplicaKind, str]] = set()

    def check(self, kind: ReplicaKind, overview: ApplicationStatusOverview) -> None:
        """Raise StartupError with the error of the replica once too many starts have failed."""
        self._seen |= {(kind, count) for count in _failed_starts(overview)}
        failed = len([each for each in self._seen if each[0] == kind]) >= _MAX_FAILED_STARTS
        if failed or overview.status == ApplicationStatus.DEPLOY_FAILED:
            raise StartupError(f"{application_name(kind)}: {failure_reason(overview)}")


def _failed_starts(overview: ApplicationStatusOverview) -> list[str]:
    """Return Serve's countdown of retries, which tells the failed starts apart."""
    texts = [deployment.message for deployment in overview.deployments.values()]
    return [found[1] for found in map(_RETRYING.search, texts) if found]


def failure_reason(overview: ApplicationStatusOverview) -> str:
    """Return the line of a replica's traceback that names the error."""
    texts = [deployment.message for deployment in overview.deployments.values()]
    lines = [line.strip() for text in [*texts, overview.message] for line in text.splitlines()]
    for cause in _CAUSES:
        for line in reversed(lines):
            if cause in line:
                return line[line.index(cause) + len(cause) :] if cause != "Error: " else line
    return lines[-1] if lines else "no reason given"


def running_replicas(deadline_s: float = CONTROLLER_S) -> dict[ReplicaKind, int]:
    """Return the number of running replicas of each deployed kind."""
    return count_running(serve_applications(deadline_s))


def count_running(found: Mapping[str, ApplicationStatusOverview]) -> dict[ReplicaKind, int]:
    """Return the number of running replicas of each kind among these applications."""
    running: dict[ReplicaKind, int] = {}
    for kind in ALL_KINDS:
        overview = found.get(application_name(kind))
        if overview is not None:
            states = [each.replica_states for each in overview.deployments.values()]
            running[kind] = sum(map(ray_internals.running_count, states))
    return running


def drain_cluster() -> None:
    """Delete the autoscaler, then the routers once their requests have finished, then the workers.

    Raises StartupError when one of them outlives the shutdown timeout it was deployed with."""
    _delete({"autoscaler"})
    _delete({"router"})
    _delete(set(ALL_KINDS))


def _delete(kinds: set[ReplicaKind]) -> None:
    """Delete the applications of ``kinds`` and wait until they are gone."""
    ending = kinds & deployed_kinds()
    deadline_s = max([0.0, *map(_shutdown_timeout_s, ending)]) + _DELETE_MARGIN_S
    for kind in ending:
        _delete_application(kind)
    end = time.monotonic() + deadline_s
    while left := ending & deployed_kinds():
        if time.monotonic() > end:
            names = ", ".join(sorted(left))
            raise StartupError(f"{names}: still running after {deadline_s:.0f} s")
        time.sleep(_POLL_S)


def _delete_application(kind: ReplicaKind) -> None:
    call_within(CONTROLLER_S, "Ray Serve", partial(ray_internals.delete_application, kind))


def _shutdown_timeout_s(kind: ReplicaKind) -> float:
    """Return the seconds after which Serve kills a replica that is shutting down."""
    read = partial(ray_internals.application_details, CONTROLLER_S)
    details = call_within(CONTROLLER_S, "Ray Serve", read).get(application_name(kind), {})
    deployments = details.get("deployments", {}).values()
    found = [each["deployment_config"]["graceful_shutdown_timeout_s"] for each in deployments]
    return max([0.0, *map(float, found)])

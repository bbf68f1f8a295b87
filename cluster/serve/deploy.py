"""Puts Baton's applications on Serve, waits until they run, updates them, and takes them away."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from math import ceil

from ray import serve
from ray.serve._private.common import ReplicaState
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster.local.start_report import Waiting
from cluster.serve import applications as serve_app
from cluster.serve import ray_internals, ray_runtime
from cluster.serve.applications import Layout
from cluster.serve.replica_kinds import ACTING, APPLICATIONS, KINDS, Kind, application, resource
from cluster.serve.replicas import KILL_S
from cluster.settings.launch_settings import Launch
from protocol.errors import StartupError
from protocol.roles import ROLES, Role

_POLL_S = 0.25
_SAY_S = 1.0
_LATE_S = 30.0
_ANSWER_S = 30.0
_STARTS = 2  # that may fail before a deployment is said to
_RETRYING = re.compile(r"replica failed to start.* Retrying (\d+) more time")
_CAUSES = ("StartupError: ", "EngineDied: ", "Error: ")

Say = Callable[[Waiting], None]


def run(launch: Launch, layout: Layout, say: Say) -> None:
    """Deploys all of it and returns when every replica runs; ``say``s now and then for which it
    waits. What runs already is updated, one kind after the other: where nodes have room, new
    replicas come first; else Serve stops a fifth of them at a time.

    Raises StartupError with what a replica said, or with what is missing at the deadline.
    """
    wanted = [kind for kind in APPLICATIONS if serve_app.count(kind, launch)]
    if launch.autoscaler.mode != "act" and acting():
        _delete({"autoscaler"})  # or it would change numbers while they are being set
    there = replicas()
    for kind in there.keys() - set(wanted):
        serve.delete(application(kind), _blocking=False)
    placed, others = [k for k in wanted if k in KINDS], [k for k in wanted if k not in KINDS]
    for kinds in [[kind] for kind in wanted] if there else filter(None, [placed, others]):
        rooms = {kind: _room(kind, there.get(kind, 0), layout.gpus) for kind in kinds}
        serve.run_many(
            [_target(kind, launch, layout, rooms[kind]) for kind in kinds],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        wait_until_running(kinds, _within(launch, there, rooms), say)


def _room(kind: Kind, running: int, gpus: float) -> int:
    """For how many more of a kind the living nodes have slots, and GPUs where each takes some."""
    if kind not in KINDS:
        return 0
    slots = ray_runtime.declared().get(resource(kind), 0) - running
    if kind != "router" and gpus:
        slots = min(slots, ray_runtime.available().get("GPU", 0) / gpus)
    return max(0, int(slots))


def _within(launch: Launch, there: dict[Kind, int], rooms: dict[Kind, int]) -> float:
    """Seconds that this may take: a start; of those replaced, one for each lot, and its drain."""
    lots = [ceil(n / max(1, rooms[kind], n // 5)) for kind, n in there.items() if kind in rooms]
    return launch.start_deadline_s + max([0, *lots]) * (
        launch.start_deadline_s + launch.drain_s + KILL_S
    )


def deployed() -> set[Kind]:
    """Kinds that Serve has."""
    applications = serve.status().applications
    return {kind for kind in APPLICATIONS if application(kind) in applications}


def acting() -> bool:
    """Whether an autoscaler sets the numbers of workers."""
    there = serve.status().applications.get(application("autoscaler"))
    going = (ApplicationStatus.DELETING, ApplicationStatus.NOT_STARTED)
    return there is not None and there.status not in going and ACTING in there.deployments


def autoscaled() -> dict[Role, int]:
    """Workers that the autoscaler has asked for; empty where none acts."""
    if not acting():
        return {}
    found = ray_internals.targets(_ANSWER_S)
    return {role: found[role] for role in ROLES if role in found}


def _target(kind: Kind, launch: Launch, layout: Layout, room: int) -> serve.RunTarget:
    return serve.RunTarget(
        target=serve_app.built(kind, launch, layout, room),
        name=application(kind),
        route_prefix=None,
        logging_config=ray_runtime.logging_config(),
        external_scaler_enabled=True,
    )


def wait_until_running(kinds: Sequence[Kind], deadline_s: float, say: Say) -> None:
    """Raises StartupError with what a replica said, or with what is missing at the deadline."""
    end = time.monotonic() + deadline_s
    tell = Telling(say, end)
    failures: set[tuple[Kind, str]] = set()
    while True:
        applications = serve.status().applications
        waiting = []
        for kind in kinds:
            overview = applications.get(application(kind))
            if overview is None or overview.status != ApplicationStatus.RUNNING:
                waiting.append(kind)
            if overview is None:
                continue
            failures |= {(kind, count) for count in _failed_starts(overview)}
            failed = len([each for each in failures if each[0] == kind]) >= _STARTS
            if failed or overview.status == ApplicationStatus.DEPLOY_FAILED:
                raise StartupError(f"{application(kind)}: {reason(overview)}")
        if not waiting:
            return
        if time.monotonic() > end:
            raise StartupError(
                f"still waiting for {', '.join(waiting)} after {deadline_s:.0f} s{slots(waiting)}"
            )
        tell(waiting)
        time.sleep(_POLL_S)


class Telling:
    """Says for what it waits, but not too often. ``end``: of the wait, by the monotonic clock."""

    def __init__(self, say: Say, end: float) -> None:
        self._say = say
        self._end = end
        self._said = 0.0

    def __call__(self, names: Sequence[str]) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_S:
            self._said = now
            self._say(Waiting(tuple(names), max(0.0, self._end - now)))


def slots(kinds: Sequence[Kind]) -> str:
    """What the nodes declare, where that may be why."""
    there = ray_runtime.declared()
    said = [f"{there.get(resource(k), 0):.0f} {resource(k)}" for k in kinds if k in KINDS]
    return f"; the cluster's nodes declare {', '.join(said)}" if said else ""


def _failed_starts(overview: ApplicationStatusOverview) -> list[str]:
    """A number for the last start that failed: another one for each, as Serve counts down."""
    texts = [deployment.message for deployment in overview.deployments.values()]
    return [found[1] for found in map(_RETRYING.search, texts) if found]


def reason(overview: ApplicationStatusOverview) -> str:
    """The line of a replica's traceback that says what was wrong."""
    texts = [deployment.message for deployment in overview.deployments.values()]
    lines = [line.strip() for text in [*texts, overview.message] for line in text.splitlines()]
    for cause in _CAUSES:
        for line in reversed(lines):
            if cause in line:
                return line[line.index(cause) + len(cause) :] if cause != "Error: " else line
    return lines[-1] if lines else "no reason given"


def replicas() -> dict[Kind, int]:
    """How many run of each kind that is deployed."""
    applications = serve.status().applications
    found: dict[Kind, int] = {}
    for kind in APPLICATIONS:
        overview = applications.get(application(kind))
        if overview is not None:
            states = [each.replica_states for each in overview.deployments.values()]
            found[kind] = sum(count.get(ReplicaState.RUNNING, 0) for count in states)
    return found


def drain() -> None:
    """Takes the autoscaler away, the routers when they have finished their requests, then the
    workers. Raises
    StartupError when they are not gone long after the time that they were deployed with."""
    _delete({"autoscaler"})
    _delete({"router"})
    _delete(set(APPLICATIONS))


def _delete(kinds: set[Kind]) -> None:
    going = kinds & deployed()
    within_s = max([0.0, *map(_shutdown_s, going)]) + _LATE_S
    for kind in going:
        serve.delete(application(kind), _blocking=False)  # blocking, it would wait 60 s at most
    end = time.monotonic() + within_s
    while left := going & deployed():
        if time.monotonic() > end:
            names = ", ".join(sorted(left))
            raise StartupError(f"{names}: still there after {within_s:.0f} s")
        time.sleep(_POLL_S)


def _shutdown_s(kind: Kind) -> float:
    """After which Serve kills a replica that is to end."""
    deployments = ray_internals.details().get(application(kind), {}).get("deployments", {}).values()
    found = [each["deployment_config"]["graceful_shutdown_timeout_s"] for each in deployments]
    return max([0.0, *map(float, found)])

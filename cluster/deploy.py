"""Puts Baton's applications on Serve, waits until they run, changes them, and takes them away."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster import ray_runtime, serve_app
from cluster.events import Waiting
from cluster.kinds import KINDS, Kind, application, resource
from cluster.launch import Launch
from cluster.serve_app import KILL_S, Layout
from protocol.errors import StartupError

_POLL_S = 0.1
_SAY_S = 1.0
_LATE_S = 30.0
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
    wanted = [kind for kind in KINDS if serve_app.count(kind, launch)]
    there = replicas()
    for kind in there.keys() - set(wanted):
        serve.delete(application(kind), _blocking=False)
    for kinds in [[kind] for kind in wanted] if there else [wanted]:
        rooms = {kind: _room(kind, there.get(kind, 0), layout.gpus) for kind in kinds}
        serve.run_many(
            [_target(kind, launch, layout, rooms[kind]) for kind in kinds],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        wait_until_running(kinds, _within(launch, there, rooms), say)


def _room(kind: Kind, running: int, gpus: float) -> int:
    """For how many more of a kind the living nodes have slots, and GPUs where each takes some."""
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
    return {kind for kind in KINDS if application(kind) in applications}


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
                raise StartupError(f"{application(kind)}: {_reason(overview)}")
        if not waiting:
            return
        if time.monotonic() > end:
            raise StartupError(
                f"still waiting for {', '.join(waiting)} after {deadline_s:.0f} s{_slots(waiting)}"
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


def _slots(kinds: Sequence[Kind]) -> str:
    """What the nodes declare, where that may be why."""
    there = ray_runtime.declared()
    said = [f"{there.get(resource(kind), 0):.0f} {resource(kind)}" for kind in kinds]
    return f"; the cluster's nodes declare {', '.join(said)}"


def _failed_starts(overview: ApplicationStatusOverview) -> list[str]:
    """A number for the last start that failed: another one for each, as Serve counts down."""
    texts = [deployment.message for deployment in overview.deployments.values()]
    return [found[1] for found in map(_RETRYING.search, texts) if found]


def _reason(overview: ApplicationStatusOverview) -> str:
    """The line of a replica's traceback that says what was wrong."""
    texts = [deployment.message for deployment in overview.deployments.values()]
    lines = [line.strip() for text in [*texts, overview.message] for line in text.splitlines()]
    for cause in _CAUSES:
        for line in reversed(lines):
            if cause in line:
                return line[line.index(cause) + len(cause) :] if cause != "Error: " else line
    return lines[-1] if lines else "no reason given"


def scale(counts: dict[Kind, int], deadline_s: float, say: Say) -> dict[Kind, int]:
    """Sets numbers of replicas, waits until they run, and returns those before. The others are not
    touched. Raises StartupError for a kind that is not there, and as ``wait_until_running``."""
    before = replicas()
    absent = [kind for kind in counts if kind not in before]
    if absent:
        raise StartupError(
            f"the cluster runs no {absent[0]} replicas that could be scaled; it runs "
            + (", ".join(f"{count} {kind}" for kind, count in before.items()) or "none at all")
        )
    controller = _client()._controller
    for kind, count in counts.items():
        identity = DeploymentID(name=serve_app.class_name(kind), app_name=application(kind))
        ray.get(controller.update_deployment_replicas.remote(identity, count), timeout=deadline_s)
    _wait_for(counts, deadline_s, say)
    return {kind: before[kind] for kind in counts}


def replicas() -> dict[Kind, int]:
    """How many run of each kind that is deployed."""
    applications = serve.status().applications
    found: dict[Kind, int] = {}
    for kind in KINDS:
        overview = applications.get(application(kind))
        if overview is not None:
            states = [each.replica_states for each in overview.deployments.values()]
            found[kind] = sum(count.get(ReplicaState.RUNNING, 0) for count in states)
    return found


def _failing(kinds: Sequence[Kind]) -> list[str]:
    """What replicas that fail to start say of it."""
    applications = serve.status().applications
    found = [applications[name] for name in map(application, kinds) if name in applications]
    return [
        _reason(overview)
        for overview in found
        if any("failed to start" in each.message for each in overview.deployments.values())
    ]


def _wait_for(counts: dict[Kind, int], deadline_s: float, say: Say) -> None:
    end = time.monotonic() + deadline_s
    tell = Telling(say, end)
    while True:
        running = replicas()
        waiting: list[Kind] = [kind for kind, n in counts.items() if running.get(kind, 0) != n]
        if not waiting:
            return
        if time.monotonic() > end:
            shown = ", ".join(f"{running.get(k, 0)} of {counts[k]} {k}" for k in waiting)
            why = _slots(waiting) + "".join(f"; {reason}" for reason in _failing(waiting))
            raise StartupError(f"after {deadline_s:.0f} s {shown} run{why}")
        tell(waiting)
        time.sleep(_POLL_S)


def drain() -> None:
    """Takes the routers away when they have finished their requests, then the workers. Raises
    StartupError when they are not gone long after the time that they were deployed with."""
    _delete({"router"})
    _delete(set(KINDS))


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
    applications = _client().get_serve_details()["applications"]
    deployments = applications.get(application(kind), {}).get("deployments", {}).values()
    found = [each["deployment_config"]["graceful_shutdown_timeout_s"] for each in deployments]
    return max([0.0, *map(float, found)])


def _client() -> Any:
    """Serve's own, for what it has in public by HTTP alone, with a dashboard."""
    client = serve.context._get_global_client()
    assert client is not None  # whoever asks has asked Serve before
    return client

"""Names the kinds of replicas in Ray and Serve; used by everything that deploys or scales them."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from protocol.roles import ROLES

ReplicaKind: TypeAlias = Literal["prefill", "decode", "router", "autoscaler"]
SCALABLE_KINDS: tuple[ReplicaKind, ...] = (*ROLES, "router")
"""Kinds that may have many replicas, and for which nodes declare a custom resource."""
ALL_KINDS: tuple[ReplicaKind, ...] = (*SCALABLE_KINDS, "autoscaler")
"""All kinds, in the order in which an update replaces them."""


class DeadReplica(NamedTuple):
    """A replica whose process ended without Serve having stopped it. ``out_of_memory``: Ray did."""

    id: str
    kind: ReplicaKind
    pid: int
    out_of_memory: bool


UNLIMITED_RETRIES = 1_000_000
"""Number of failed replica starts after which Serve gives up. A controller that restarts also
counts the replicas of dead hosts as failed starts; with a low limit it would leave a pool of one
worker empty for good. ``deploy.wait_until_running`` detects failing starts itself."""

ACTING_AUTOSCALER = "Autoscaler"
ADVISING_AUTOSCALER = "Adviser"


def application_name(kind: ReplicaKind) -> str:
    """Return the name of the kind's Serve application."""
    return f"baton-{kind}"


def deployment_name(kind: ReplicaKind, *, advising: bool = False) -> str:
    """Return the name of the deployment in the application.

    An ``advising`` autoscaler has another name, so that its name in Serve tells whether
    autoscaling changes the replica counts."""
    if kind == "autoscaler":
        return ADVISING_AUTOSCALER if advising else ACTING_AUTOSCALER
    return {"prefill": "PrefillWorker", "decode": "DecodeWorker", "router": "Router"}[kind]


def option_name(kind: ReplicaKind) -> str:
    """Return the name of the kind on the command line of `baton scale`."""
    return "routers" if kind == "router" else kind


_COUNT_KEYS: dict[ReplicaKind, str] = {
    "prefill": "pools.prefill.workers",
    "decode": "pools.decode.workers",
    "router": "router.replicas",
    "autoscaler": "autoscaler.mode",
}


def count_change_text(kind: ReplicaKind, running: int, configured: int) -> str:
    """Return a line about a number that `baton up` changes to the configured one."""
    noun = "" if kind in ("router", "autoscaler") else " workers"
    change = f"{option_name(kind)}: {running} -> {configured}{noun}"
    return f"{change}, as configured ({_COUNT_KEYS[kind]})"


def resource_name(kind: ReplicaKind) -> str:
    """Return the custom Ray resource that says how many replicas of the kind a node takes."""
    return f"baton_{kind}"

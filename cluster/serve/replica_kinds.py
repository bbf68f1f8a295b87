"""The kinds of replicas, and what they are called in Ray and Serve."""

from __future__ import annotations

from typing import Literal, TypeAlias

from protocol.roles import ROLES

Kind: TypeAlias = Literal["prefill", "decode", "router", "autoscaler"]
KINDS: tuple[Kind, ...] = (*ROLES, "router")
"""Those that nodes declare room for, and of which there may be many."""
APPLICATIONS: tuple[Kind, ...] = (*KINDS, "autoscaler")
"""In the order in which they are updated."""

NEVER_GIVE_UP = 1_000_000
"""Failed starts of replicas after which Serve tries no more. A controller that comes back counts
those of dead hosts among them, and would leave a pool of one worker for good. Whoever deploys sees
by himself that starts fail (``deploy``)."""


def application(kind: Kind) -> str:
    """Its name in Serve."""
    return f"baton-{kind}"


def class_name(kind: Kind) -> str:
    """What Serve calls the deployment; an autoscaler that only advises has another one."""
    names = {"prefill": "PrefillWorker", "decode": "DecodeWorker", "router": "Router"}
    return names.get(kind, ACTING)


ACTING = "Autoscaler"
ADVISING = "Adviser"


def resource(kind: Kind) -> str:
    """Ray's custom resource: how many of a kind a node takes."""
    return f"baton_{kind}"

"""The kinds of replicas, and what they are called in Ray and Serve."""

from __future__ import annotations

from typing import Literal, TypeAlias

from cluster.settings import ROLES

Kind: TypeAlias = Literal["prefill", "decode", "router"]
KINDS: tuple[Kind, ...] = (*ROLES, "router")

NEVER_GIVE_UP = 1_000_000
"""Failed starts of replicas after which Serve tries no more. A controller that comes back counts
those of dead hosts among them, and would leave a pool of one worker for good. Whoever deploys sees
by himself that starts fail (``deploy``)."""


def application(kind: Kind) -> str:
    """Its name in Serve."""
    return f"baton-{kind}"


def resource(kind: Kind) -> str:
    """Ray's custom resource: how many of a kind a node takes."""
    return f"baton_{kind}"

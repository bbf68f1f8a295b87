"""The kinds of replicas, and what they are called in Ray and Serve."""

from __future__ import annotations

from typing import Literal, TypeAlias

from cluster.settings import ROLES

Kind: TypeAlias = Literal["prefill", "decode", "router"]
KINDS: tuple[Kind, ...] = (*ROLES, "router")


def application(kind: Kind) -> str:
    """Its name in Serve."""
    return f"baton-{kind}"


def resource(kind: Kind) -> str:
    """Ray's custom resource: how many of a kind a node takes."""
    return f"baton_{kind}"

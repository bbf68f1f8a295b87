"""What an autoscaler is to do; apart from its settings, so that the command line imports little."""

from __future__ import annotations

from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["off", "advise", "act"]

MOST = 10_000
"""Workers of one pool."""

"""One alerting rule. ``page``: somebody looks now; ``ticket``: on the next working day."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

RUNBOOK = "docs/operations.md"

Severity: TypeAlias = Literal["page", "ticket"]


@dataclass(frozen=True)
class Alert:
    """One rule: fires for each series of ``expr``, once that lasted for ``lasts``."""

    name: str
    severity: Severity
    expr: str
    summary: str
    description: str
    lasts: str | None = None

    @property
    def runbook(self) -> str:
        return f"{RUNBOOK}#{self.name.lower()}"

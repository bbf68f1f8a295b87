"""Workers that the directory lists and a router does not use: each is named once in the log."""

from __future__ import annotations

import logging

from protocol.directory import ModelInfo, WorkerRecord

log = logging.getLogger(__name__)


class Refusals:
    """By instance; of one router."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def add(self, record: WorkerRecord, why: str) -> None:
        if record.instance not in self._named:
            self._named.add(record.instance)
            log.warning("ignoring %s worker %s: %s", record.role, record.endpoint, why)

    def other_model(self, record: WorkerRecord, expected: ModelInfo) -> None:
        has, due = _shown(record.model), _shown(expected)
        self.add(record, f"its {record.model.id} has {has}, expected {due}")


def _shown(model: ModelInfo) -> str:
    return f"fingerprint {model.fingerprint} ({model.precision})"

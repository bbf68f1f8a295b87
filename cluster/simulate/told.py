"""Whom a worker tells what becomes of requests, and of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from cluster.simulate.job import Job

if TYPE_CHECKING:
    from cluster.simulate.worker import Worker

Standing = Literal["serving", "changing", "leaving", "gone"]


class Told(Protocol):
    def started(self, job: Job) -> None:
        """Its prompt is being computed, elsewhere than where it will decode."""

    def computed(self, job: Job) -> None:
        """Its first token is there."""

    def reserved(self, job: Job) -> None:
        """There is room for its KV, where it will decode."""

    def idle(self, worker: Worker) -> None:
        """One that is to change or to go has nothing left to do."""

    def finished(self, job: Job) -> None:
        """Its last token is there."""

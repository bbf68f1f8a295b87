"""One request, from its arrival to its end.

    placed --P starts--> computing --first token--> sent --KV here--> joining --row--> decoding
       |                                                                               |
       +--D computes the prompt itself-------------------------------------------------+--> ended

An attempt that a death or a hand-over cut short begins anew: its context is the prompt and the
tokens that are out already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from cluster.simulator.devices.worker import Worker


Status = Literal["ok", "refused", "failed", "too_long", ""]
"""refused: by admission; failed: by deaths, or for want of a decode worker; "": under way."""

Stage = Literal["placed", "computing", "computed", "joining", "decoding", "ended"]


class Job:
    """Compared and hashed by identity. Seconds since the beginning; tokens."""

    __slots__ = (
        "at",
        "attempt",
        "blocks",
        "cached",
        "computed_s",
        "context",
        "d",
        "deaths",
        "done_s",
        "emitted",
        "fetched",
        "first_s",
        "kv_cached",
        "left",
        "local",
        "need",
        "number",
        "output",
        "p",
        "predicted_s",
        "promised",
        "prompt",
        "reserved_s",
        "stage",
        "started_s",
        "status",
        "tail",
        "uncached",
    )  # fmt: skip

    def __init__(
        self, number: int, at: float, prompt: int, output: int, blocks: tuple[bytes, ...] = ()
    ) -> None:
        self.number = number
        self.at = at
        self.prompt = prompt
        self.output = output
        self.blocks = blocks  # keys of the whole prompt, each of ``cache.BLOCK`` tokens
        self.status: Status = ""
        self.emitted = 0
        self.first_s: float | None = None
        self.done_s: float | None = None
        self.uncached = 0  # of the prompt, when its first token came
        self.deaths = 0
        self.attempt = 0
        self.clear()

    def clear(self) -> None:
        """Nothing of an attempt is left; the next one has another number."""
        self.attempt += 1
        self.stage: Stage = "placed"
        self.p: Worker | None = None  # None: D computes the prompt
        self.d: Worker | None = None
        self.local = False
        self.context = self.prompt + self.emitted
        self.left = self.output - self.emitted
        self.need = 0  # tokens that it takes of D's pool
        self.cached = 0  # of the context, where it is computed
        self.kv_cached = 0  # of the context, at D
        self.tail = 0  # tokens of the last chunk
        self.fetched = 0
        self.promised = (0.0, 0)  # in the books: seconds of computing, KV tokens
        self.predicted_s = 0.0
        self.started_s: float | None = None
        self.computed_s: float | None = None
        self.reserved_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.at

    @property
    def tpot_s(self) -> float | None:
        """None with fewer than two tokens."""
        if self.first_s is None or self.done_s is None or self.output < 2 or self.status != "ok":
            return None
        return (self.done_s - self.first_s) / (self.output - 1)


# MERGED cluster.simulate.told
# Whom a worker tells what becomes of requests, and of itself.

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

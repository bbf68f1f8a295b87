"""One submission of a request: owns its work at the workers, and its place in the books.

placed --first tokens--> ... --finish--> learnt from
   |                      |
   +----------------------+--> released: cancelled where it still runs; once, however often
"""

from __future__ import annotations

import time

from protocol.requests import Request
from protocol.wire import wire_pb2 as pb
from router.generation.placer import Placed, Placer
from router.placement.cost import Placement
from router.workers.mailbox import Mailbox


class Attempt:
    """Submits at once. ``request`` bears an id of its own."""

    def __init__(self, placer: Placer, placed: Placed, request: Request, mailbox: Mailbox) -> None:
        self.placed = placed
        self.first_token_s: float | None = None  # since it was submitted
        self.timeline: dict[str, float] = {}
        self.measured: pb.Measured | None = None
        self.submitted = time.perf_counter()
        self._learned = placer.learned
        self._id = request.id
        self._mailbox = mailbox
        message = placer.message(placed, request)
        message.deaths = mailbox.deaths
        mailbox.timeline, mailbox.measured = {}, None
        self._ticket = placer.open(placed, request.priority)
        self._open = True
        placed.link.submit(message, mailbox)

    @property
    def chosen(self) -> Placement:
        return self.placed.choice.chosen

    @property
    def computing(self) -> str:
        """The worker that was to compute the prompt."""
        return self.chosen.prefill or self.chosen.decode

    def took_tokens(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.submitted
            correction = self._learned.correction(self.computing)
            predicted = self.chosen.ttft_s / correction
            self._learned.first_token(self.computing, predicted, self.first_token_s)
        self._ticket.tokens_came()

    def finished(self) -> None:
        """The last token has come: what the worker says of it is here."""
        self._keep_account()
        decode = self.chosen.decode
        if self.measured is None:
            return
        self._learned.handed_over(decode, self.measured)
        if self.measured.prefill_instance == self.chosen.prefill:
            self._learned.path(
                self.chosen.prefill, decode, self.timeline.get("prefill_queued", -1.0)
            )

    def release(self) -> None:
        if self._open:
            self._open = False
            self._keep_account()
            self.placed.link.cancel(self._id)
            self._ticket.release()

    def _keep_account(self) -> None:
        self.timeline = self._mailbox.timeline or self.timeline
        self.measured = self._mailbox.measured or self.measured

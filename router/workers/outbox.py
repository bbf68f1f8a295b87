"""Orders what waits to be written to one decode worker: submits, the oldest first, and cancels.

    submit --> waiting --next_message--> written --record_report--> seen by the worker
                  |                         +-----cancel--> a cancel in the next message
                  +--cancel--> removed: the worker never hears of the request

So a cancel never overtakes its submit, whatever is queued, and cancels of work that is under way
wait for no submit. The worker's reports of its load say how many submits of the stream they
contain; ``unseen`` are the others. ``DecodeLink`` has one outbox.
"""

from __future__ import annotations

from collections.abc import Collection

from protocol.wire import wire_pb2 as pb

MESSAGE_BYTES = 4 << 20
"""Submits in one message; a larger one is alone in its message. Well below the limit of gRPC."""

MAX_UNSEEN = 4096
"""Unseen submits that are remembered: more than a worker can hold, and a hostile one sees none."""


class Outbox:
    """Submits and cancels of one stream. It has no bound of its own: admission limits the requests
    of a router, and a request has one submit or one cancel here."""

    def __init__(self) -> None:
        self._submits: dict[str, pb.Submit] = {}  # by request id, oldest first
        self._cancels: list[str] = []
        self._submitted = 0  # on this stream
        self._unseen: dict[str, None] = {}  # request ids, oldest first

    def __bool__(self) -> bool:
        return bool(self._submits or self._cancels)

    def submit(self, message: pb.Submit) -> None:
        """Queue a submit; its request id is new."""
        request_id = message.request.id
        self._submits[request_id] = message
        self._submitted += 1
        self._unseen[request_id] = None
        if len(self._unseen) > MAX_UNSEEN:
            del self._unseen[next(iter(self._unseen))]

    def cancel(self, request_id: str) -> None:
        """Remove a submit that was not written yet, or queue a cancel of a written one."""
        if self._submits.pop(request_id, None) is None:
            self._cancels.append(request_id)
        else:
            self._submitted -= 1
            self._unseen.pop(request_id, None)

    @property
    def unseen(self) -> Collection[str]:
        """Return the requests whose submits the last report did not contain, also those that were
        cancelled after they had been written."""
        return self._unseen.keys()

    def record_report(self, submits_seen: int | None) -> None:
        """Record that a report contains the first ``submits_seen`` submits of the stream; None: all
        of them, as the worker does not count."""
        seen = self._submitted if submits_seen is None else submits_seen
        while len(self._unseen) > max(0, self._submitted - seen):
            del self._unseen[next(iter(self._unseen))]

    def clear(self) -> set[str]:
        """Forget everything: the stream has ended. Return the requests that were not written."""
        waiting = set(self._submits)
        self._submits.clear()
        self._cancels.clear()
        self._submitted = 0
        self._unseen.clear()
        return waiting

    def next_message(self) -> pb.RouterMessage:
        """Take what waits, up to MESSAGE_BYTES of submits; the rest stays."""
        message = pb.RouterMessage(cancel=self._cancels)
        self._cancels = []
        room = MESSAGE_BYTES
        while self._submits:
            request_id, submit = next(iter(self._submits.items()))
            room -= submit.ByteSize()
            if room < 0 and message.submit:
                break
            message.submit.append(submit)
            del self._submits[request_id]
        return message

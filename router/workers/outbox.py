"""Orders what waits to be written to one decode worker: submits, the oldest first, and cancels.

    submit --> waiting --next_message--> written --cancel--> a cancel in the next message
                  |
                  +--cancel--> removed: the worker never hears of the request

So a cancel never overtakes its submit, whatever is queued, and cancels of work that is under way
wait for no submit. ``DecodeLink`` has one outbox.
"""

from __future__ import annotations

from protocol.wire import wire_pb2 as pb

MESSAGE_BYTES = 4 << 20
"""Submits in one message; a larger one is alone in its message. Well below the limit of gRPC."""


class Outbox:
    """Submits and cancels of one stream. It has no bound of its own: admission limits the requests
    of a router, and a request has one submit or one cancel here."""

    def __init__(self) -> None:
        self._submits: dict[str, pb.Submit] = {}  # by request id, oldest first
        self._cancels: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._submits or self._cancels)

    def submit(self, message: pb.Submit) -> None:
        """Queue a submit; its request id is new."""
        self._submits[message.request.id] = message

    def cancel(self, request_id: str) -> bool:
        """Remove a submit that was not written yet, or queue a cancel of a written one. Return
        whether it was written."""
        written = self._submits.pop(request_id, None) is None
        if written:
            self._cancels.append(request_id)
        return written

    def clear(self) -> set[str]:
        """Forget everything: the stream has ended. Return the requests that were not written."""
        waiting = set(self._submits)
        self._submits.clear()
        self._cancels.clear()
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

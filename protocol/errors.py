"""The errors of the world, in one small tree.

    BatonError
    ├── InvalidRequest      the caller's fault; names the field              HTTP 400
    ├── NotFound            no such model                                    HTTP 404
    ├── Unavailable         nobody can take the request now; retry later     HTTP 503
    ├── TransferFailed      KV did not arrive intact or in time; the decode worker recovers
    │   └── PeerLost        for the other end died or fell silent
    ├── EngineDied          the engine process ended or stopped answering
    ├── MalformedEvents     a report of what a worker has cached cannot be read
    └── StartupError        a process cannot start as configured; says what to change

Bugs of our own are ``assert``; these are for input, networks, disks and other processes.
"""


class BatonError(Exception):
    """Base of every error that Baton raises on purpose."""


class InvalidRequest(BatonError):
    """The request itself is wrong. ``param`` is the field, in the caller's own terms."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFound(BatonError):
    """The request names something that is not served here."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unavailable(BatonError):
    """No worker can take the request now."""


class TransferFailed(BatonError):
    """KV did not arrive intact or in time."""


class PeerLost(TransferFailed):
    """The worker at the other end died or fell silent. ``at_work``: with the request in it."""

    def __init__(self, message: str, *, at_work: bool) -> None:
        super().__init__(message)
        self.at_work = at_work


class EngineDied(BatonError):
    """The engine process ended, or stopped answering, while work was in it."""


class MalformedEvents(BatonError):
    """A report of what a worker has cached cannot be read; the index does without it."""


class StartupError(BatonError):
    """A process cannot start as configured; the message says what to change."""

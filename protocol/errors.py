"""The tree of errors that Baton raises on purpose.

    BatonError
    ├── InvalidRequest      the request is wrong; names the field            HTTP 400
    ├── NotFound            no such model                                    HTTP 404
    ├── Unavailable         no worker can take the request now; retry later  HTTP 503
    ├── TransferFailed      KV did not arrive intact or in time; the decode worker recovers
    │   ├── PeerLost        because the other worker died or fell silent
    │   ├── PeerRefused     because the other worker lives and does not serve the request
    │   ├── CarrierFailed   because of the link alone: the other worker lives
    │   └── NoPages         because this worker has no pages for it in time
    ├── EngineDied          the engine process ended or stopped answering
    ├── MalformedEvents     a report of what a worker has cached cannot be read
    └── StartupError        a process cannot start as configured; says what to change
        └── UsageError      because of an option or argument of its command line

These are for faults of input, networks, disks and other processes. Bugs of Baton itself are
``assert``.
"""

from __future__ import annotations


class BatonError(Exception):
    """Base class of the tree."""


class InvalidRequest(BatonError):
    """The request itself is wrong. ``param`` is the field as the caller names it, ``code`` the
    error code of the OpenAI API."""

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
    """The other worker died or fell silent. ``at_work``: it had accepted the request by then."""

    def __init__(self, message: str, *, at_work: bool) -> None:
        super().__init__(message)
        self.at_work = at_work


class PeerRefused(TransferFailed):
    """The other worker lives and refuses the request, hands it back because it drains, or has not
    computed it in time; asking it again would not help."""


class CarrierFailed(TransferFailed):
    """The link between two workers failed, but not the other worker: another carrier may do."""


class NoPages(TransferFailed):
    """This worker had no pages for the KV in time; the other worker is not at fault."""


class EngineDied(BatonError):
    """The engine process ended, or stopped answering, while work was in it."""


class MalformedEvents(BatonError):
    """A report of what a worker has cached cannot be read; the prefix index goes on without it."""


class StartupError(BatonError):
    """A process cannot start as configured; the message says what to change."""

    exit_status = 1


class UsageError(StartupError):
    """An option or an argument of a command is wrong."""

    exit_status = 2

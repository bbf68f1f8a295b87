"""``KeyStore``: the API keys that a router accepts, read again when their file changes.

    file --changed, then unchanged for CHECK_S--> read in a thread --valid----> used from now on
                                                                   +-invalid--> logged, the last
                                                                                table stays

Routes call ``authenticate``. A request that is running when its key is revoked goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from protocol.errors import StartupError
from router.common.errors import unauthorized
from router.tenants.key_file import KeyTable, read_key_table
from router.tenants.tenant import DEFAULT_TENANT, KeyScope, Tenant

log = logging.getLogger("baton.keys")

CHECK_S = 0.5
"""Seconds between two looks at the file. A change is read at the second look that finds it alike,
because a file that is still being written may be valid and lack its last keys."""

_JOIN_S = 1.0

Stamp = tuple[int, int, int, int]
ReadTable = Callable[[str], KeyTable]


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """Return the ``Authorization`` header, or one made of ``x-api-key``, the header of Anthropic's
    clients. The names in ``headers`` are in lower case, or match any case."""
    given, key = headers.get("authorization"), headers.get("x-api-key")
    if key and not (given or "").lower().startswith("bearer "):
        return f"Bearer {key}"
    return given


class KeyFileChanges:
    """Notices changes of the file. Called by one thread."""

    def __init__(self, path: str, read: ReadTable = read_key_table) -> None:
        self._path, self._read = path, read
        self._used = self._seen = _stamp(path)

    def check(self) -> KeyTable | StartupError | None:
        """Return the table of a changed file, or why it is invalid; None: nothing to do."""
        stamp, last = _stamp(self._path), self._seen
        self._seen = stamp
        if stamp == self._used or stamp != last:
            return None
        self._used = stamp
        try:
            return self._read(self._path)
        except StartupError as error:
            return error
        except Exception as error:  # without this thread, no key could be revoked any more
            return StartupError(f"cannot read API keys from {self._path}: {type(error).__name__}")


class KeyStore:
    """The keys of one router: created -> start -> close. Raises StartupError for an invalid file.

    Without a ``path`` no key is required, and any key is accepted. ``check_s``: see ``CHECK_S``.
    """

    def __init__(
        self, path: str | None, read: ReadTable = read_key_table, check_s: float = CHECK_S
    ) -> None:
        self._check_s = check_s
        self.valid = True  # False: the file has become invalid, and the last table is in use
        self.on_change: Callable[[], None] = lambda: None  # after a new table is in use
        self._changes = None if path is None else KeyFileChanges(path, read)
        self._table: KeyTable | None = None if path is None else read(path)
        self.tenants = _tenants(self._table)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def authenticate(self, authorization: str | None, scope: KeyScope | None = None) -> Tenant:
        """Return the tenant of an ``Authorization`` header.

        Raises ApiError: 401 for a missing or unknown key, 403 for one without ``scope``. None: any
        key will do.
        """
        if self._table is None:
            return DEFAULT_TENANT
        kind, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if kind.lower() != "bearer" or not key:
            raise unauthorized(
                "no API key was provided: send it as 'Authorization: Bearer YOUR_KEY' or x-api-key"
            )
        # The time of a dict's look-up may tell something about the digest that was looked for, but
        # nobody can choose a key so that its SHA-256 digest begins like that of another one. So
        # no comparison in constant time is needed, nor one with each key.
        tenant = self._table.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest())
        if tenant is None:
            # litellm recognises an AuthenticationError by OpenAI's words.
            raise unauthorized("Incorrect API key provided: this server does not know it")
        if scope is not None:
            tenant.check_scope(scope)
        return tenant

    def start(self) -> None:
        """Look at the file from now on. Call it within the event loop."""
        if self._changes is not None and self._thread is None:
            arguments = (self._changes, asyncio.get_running_loop())
            # A daemon: a file system that hangs must not keep the process from ending.
            self._thread = threading.Thread(
                target=self._watch, args=arguments, name="api keys", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _watch(self, changes: KeyFileChanges, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.wait(self._check_s):
            found = changes.check()
            if found is not None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self.use, found)

    def use(self, found: KeyTable | StartupError) -> None:
        """Replace the table, or log why the changed file is not used."""
        self.valid = not isinstance(found, StartupError)
        if isinstance(found, StartupError):
            log.error(
                "the changed file of API keys is not used; its last content stays in use: %s", found
            )
            return
        log.info("the file of API keys has changed: %d keys are accepted now", len(found))
        self._table, self.tenants = found, _tenants(found)
        self.on_change()


def _tenants(table: KeyTable | None) -> dict[str, Tenant]:
    """Return the tenants by name, in the order of the file; scopes and priority are of any key."""
    tenants: Iterable[Tenant] = (DEFAULT_TENANT,) if table is None else table.values()
    return {tenant.name: tenant for tenant in tenants}


def _stamp(path: str) -> Stamp:
    """Return a value that changes with the file, also with its mode, and when it is missing."""
    try:
        found = Path(path).stat()
    except OSError:
        return 0, 0, 0, 0
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

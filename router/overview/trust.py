"""What this router shows to the metrics ports of others, and whom it believes there: holders of a
certificate of the cluster, and no public CA. Renewed files are used from the next look on."""

from __future__ import annotations

import contextlib
import ssl

from protocol.certificates import Pems
from protocol.errors import StartupError
from protocol.tls import Identity, TlsFiles, load


class Trust:
    """Raises StartupError for files that cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        self.name = files.name
        self._files, self._identity = files, Identity(files)
        version, pems = self._identity.current()
        self._used, self._context = version, _context(files, pems)

    def context(self) -> ssl.SSLContext:
        """For connections from now on."""
        version, pems = self._identity.current()
        if version != self._used:
            # Files that are half replaced are no use: the last ones serve until the next look.
            with contextlib.suppress(StartupError):
                self._context, self._used = _context(self._files, pems), version
        return self._context


def _context(files: TlsFiles, pems: Pems) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load(context, files.cert, files.key, "tls")
    context.load_verify_locations(cadata=pems.ca.decode("ascii", "ignore"))  # less comments
    return context

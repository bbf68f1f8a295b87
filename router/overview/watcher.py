"""Where `baton status` looks: a router's ``/sd``, and the page of every process in it."""

from __future__ import annotations

import contextlib
import ssl
from typing import Any

import msgspec

from protocol.errors import StartupError
from protocol.security.certificates import Pems
from protocol.security.tls import Identity, TlsFiles, load
from router.overview.metrics_pages import Group, Limits, NoAnswer, NotItsName, Pages, Seen

LIMITS = Limits(deadline_s=3.0, size=8 << 20)

_TRUST = "; --tls-ca, --tls-cert and --tls-key, or --config, say whom to trust"

_groups = msgspec.json.Decoder(list[Group])


class Watcher:
    """``async with``: one connection pool for all looks. ``url``: the router's; ``api_key`` goes to
    it alone; ``tls`` to processes that want certificates, which prove ``name``, or their addresses
    where it is None. The router may do either: clients dial it as they like."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._pages = Pages(LIMITS, tls=tls, name=name, trust=_TRUST)
        self._router_name: str | None = None

    async def __aenter__(self) -> Watcher:
        await self._pages.__aenter__()
        return self

    async def __aexit__(self, *gone: Any) -> None:
        await self._pages.__aexit__(*gone)

    async def look(self) -> Seen:
        """Raises NoAnswer where the router does not tell who is there."""
        url = f"{self.url}/sd"
        try:
            groups = [g for g in _groups.decode(await self._ask_router(url)) if g.targets]
        except msgspec.DecodeError as error:
            raise NoAnswer(url, f"is not Baton's: {error}") from None
        return await self._pages.look(groups)

    async def _ask_router(self, url: str) -> bytes:
        try:
            return await self._pages.get(url, self._headers, self._router_name)
        except NotItsName:
            if self._router_name == self._pages.name:
                raise
        self._router_name = self._pages.name
        return await self._pages.get(url, self._headers, self._router_name)


# MERGED router.overview.trust
# What this router shows to the metrics ports of others, and whom it believes there: holders of a
# certificate of the cluster, and no public CA. Renewed files are used from the next look on.


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

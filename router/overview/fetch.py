"""Where `baton status` looks: a router's ``/sd``, and the page of every process in it."""

from __future__ import annotations

import ssl
from typing import Any

import msgspec

from router.overview.pages import Group, Limits, NoAnswer, NotItsName, Pages, Seen

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

"""Where an overview is from: the router's ``/sd``, and the metrics page of every process in it.

Plain HTTP: no secret of the cluster is needed. Every fetch has a deadline, and what comes is
bounded and checked, like anything from a network.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from typing import Any

import aiohttp
import msgspec

from protocol.errors import BatonError
from router.overview.figures import Moment, Page, parse

DEADLINE_S = 3.0
_PAGE_BYTES = 8 << 20


class NoAnswer(BatonError):
    """The router, or one process, cannot be asked; the text says why."""


class _NotItsName(NoAnswer):
    """Its certificate is of a CA that is trusted, and for another host."""


class Group(msgspec.Struct, frozen=True):
    """One element of ``/sd``."""

    targets: list[str]
    labels: dict[str, str]

    def about(self, what: str) -> str:
        """A label about the process; empty where it has none."""
        return self.labels.get(f"__meta_baton_{what}", "")

    @property
    def target(self) -> str:
        return self.targets[0]


class Seen(msgspec.Struct, frozen=True):
    """One look: who is there, and the pages of those who answered."""

    groups: list[Group]
    moment: Moment
    silent: dict[str, str]  # target -> why there is no page


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
        self._tls, self._name = tls, name
        self._router_name: str | None = None
        self._client: aiohttp.ClientSession

    async def __aenter__(self) -> Watcher:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        self._client = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._client.close()

    async def look(self) -> Seen:
        """Raises NoAnswer where the router does not tell who is there."""
        url = f"{self.url}/sd"
        try:
            groups = [g for g in _groups.decode(await self._ask_router(url)) if g.targets]
        except msgspec.DecodeError as error:
            raise NoAnswer(f"{url} is not Baton's: {error}") from None
        pages = await asyncio.gather(*map(self._page, groups), return_exceptions=True)
        found: dict[str, Page] = {}
        silent: dict[str, str] = {}
        for group, page in zip(groups, pages, strict=True):
            if isinstance(page, NoAnswer):
                silent[group.target] = str(page)
            elif isinstance(page, BaseException):
                raise page
            else:
                found[group.target] = page
        return Seen(groups, Moment(time.monotonic(), found), silent)

    async def _ask_router(self, url: str) -> bytes:
        try:
            return await self._get(url, self._headers, self._router_name)
        except _NotItsName:
            if self._router_name == self._name:
                raise
        self._router_name = self._name
        return await self._get(url, self._headers, self._name)

    async def _page(self, group: Group) -> Page:
        url = f"{group.labels.get('__scheme__', 'http')}://{group.target}/metrics"
        text = (await self._get(url, {}, self._name)).decode(errors="replace")
        try:
            return parse(text)
        except ValueError as error:
            raise NoAnswer(f"{url}: not a page of metrics: {error}") from None

    async def _get(self, url: str, headers: dict[str, str], name: str | None) -> bytes:
        """``name``: whom it must be for; None: the host in ``url``. Raises NoAnswer."""
        try:
            async with self._client.get(
                url, headers=headers, ssl=self._tls or True, server_hostname=name
            ) as reply:
                body = await reply.content.read(_PAGE_BYTES)
                while len(body) < _PAGE_BYTES and (more := await reply.content.read(_PAGE_BYTES)):
                    body += more
                if reply.status != 200:
                    hint = "; set BATON_API_KEY to a key that it knows" * (reply.status == 401)
                    raise NoAnswer(f"{url} answers {reply.status} {reply.reason}{hint}")
                return body
        except aiohttp.InvalidURL:
            raise NoAnswer(f"{url} is no address: expected http://HOST:PORT") from None
        except TimeoutError:
            raise NoAnswer(f"{url} does not answer within {DEADLINE_S:g} s") from None
        except aiohttp.ClientConnectorCertificateError as error:
            kind = _NotItsName if _names_another(error.certificate_error) else NoAnswer
            raise kind(f"{url} cannot be reached: {_reason(error)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswer(f"{url} cannot be reached: {_reason(error)}") from None


_TRUST = "--tls-ca, --tls-cert and --tls-key, or --config, say whom to trust"


_HOSTNAME_MISMATCH = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH of OpenSSL


def _names_another(error: Exception) -> bool:
    return getattr(error, "verify_code", None) in _HOSTNAME_MISMATCH


def _reason(error: Exception) -> str:
    """In few words; the URL stands before them."""
    if isinstance(error, aiohttp.ClientSSLError):
        return f"TLS: {error.os_error.strerror or error.os_error}; {_TRUST}"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return str(error) or type(error).__name__

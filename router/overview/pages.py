"""The metrics pages of many processes, all asked at once.

Whoever asks holds no secret of the cluster. Every page has a deadline and a largest size, and what
comes is checked, like anything from a network: whatever one process is, the others are shown. Plain
HTTP goes to this machine alone: addresses are from Redis, and who can write there should not choose
whom we call.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
import msgspec

from protocol.auth import is_loopback
from protocol.errors import BatonError
from protocol.security import host_of
from router.overview.figures import Moment, Page, slim
from router.overview.reading import read
from router.overview.why import names_another, why

AT_ONCE = 8
APART_S = 0.01
"""So many are asked, then the next: streams may run on this loop, and starting costs some time."""


class NoAnswer(BatonError):
    """The router, or one process, cannot be asked; ``why``: without the address."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{url} {why}")
        self.why = why


class NotItsName(NoAnswer):
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


class Limits(NamedTuple):
    """Of one page."""

    deadline_s: float
    size: int  # bytes


class Pages:
    """``async with``: one connection pool. ``tls`` is shown to processes that want certificates,
    which prove ``name``, or their addresses where it is None; ``trust`` says what to do about a
    certificate that is not believed. ``slim``: leaves the lines of a page that are wanted."""

    def __init__(
        self,
        limits: Limits,
        *,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        trust: str = "",
        slim: Callable[[str], str] = slim,
    ) -> None:
        self.name = name
        self._slim = slim
        self._limits, self._tls, self._trust = limits, tls, trust
        self._parsing = asyncio.Lock()
        self._client: aiohttp.ClientSession

    async def __aenter__(self) -> Pages:
        timeout = aiohttp.ClientTimeout(total=self._limits.deadline_s)
        self._client = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._client.close()

    async def look(self, groups: list[Group]) -> Seen:
        """What all of them show now."""
        asking = (self._page(group, i // AT_ONCE * APART_S) for i, group in enumerate(groups))
        pages = await asyncio.gather(*asking, return_exceptions=True)
        found: dict[str, Page] = {}
        silent: dict[str, str] = {}
        for group, page in zip(groups, pages, strict=True):
            if isinstance(page, NoAnswer):
                silent[group.target] = page.why
            elif isinstance(page, Exception):
                silent[group.target] = why(page)
            elif isinstance(page, BaseException):
                raise page
            else:
                found[group.target] = page
        return Seen(groups, Moment(time.monotonic(), found, frozenset(silent)), silent)

    async def _page(self, group: Group, after_s: float) -> Page:
        await asyncio.sleep(after_s)
        scheme = group.labels.get("__scheme__", "http")
        url = f"{scheme}://{group.target}/metrics"
        if scheme != "https" and not is_loopback(host_of(group.target)):
            raise NoAnswer(url, "is not asked: beyond this machine it must be https")
        body = await self.get(url, {}, self.name)
        async with self._parsing:  # one page at a time
            try:
                return await read(body, self._slim)
            except ValueError:  # its text has theirs
                raise NoAnswer(url, "is not a page of metrics") from None

    async def get(self, url: str, headers: dict[str, str], name: str | None) -> bytes:
        """``name``: whom it must be for; None: the host in ``url``. Raises NoAnswer."""
        try:
            async with self._client.get(
                url,
                headers=headers,
                ssl=self._tls or True,
                server_hostname=name,
                allow_redirects=False,
            ) as reply:
                if reply.status != 200:
                    hint = "; set BATON_API_KEY to a key that it knows" * (reply.status == 401)
                    raise NoAnswer(url, f"answers {reply.status}{hint}")
                return await self._body(url, reply)
        except TimeoutError:
            late = f"does not answer within {self._limits.deadline_s:g} s"
            raise NoAnswer(url, late) from None
        except aiohttp.ClientConnectorCertificateError as error:
            kind = NotItsName if names_another(error.certificate_error) else NoAnswer
            raise kind(url, why(error) + self._trust) from None
        except aiohttp.ClientSSLError as error:
            raise NoAnswer(url, why(error) + self._trust) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswer(url, why(error)) from None

    async def _body(self, url: str, reply: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for part in reply.content.iter_any():
            body += part
            if len(body) > self._limits.size:
                raise NoAnswer(url, f"sends more than {self._limits.size >> 10} KiB")
        return bytes(body)

"""The metrics pages of many processes, all asked at once.

Whoever asks holds no secret of the cluster. Every page has a deadline and a largest size, and what
comes is checked, like anything from a network: whatever one process is, the others are shown. Plain
HTTP goes to this machine alone: addresses are from Redis, and who can write there should not choose
whom we call.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable, Iterator
from socket import gaierror
from typing import Any, NamedTuple

import aiohttp
import msgspec

from protocol.endpoints.grpc_endpoints import host_of
from protocol.errors import BatonError
from protocol.security.cluster_token import is_loopback
from router.overview.prometheus_text import Moment, Page, parse, slim

# MERGED router.overview.reading
# A page of metrics that came from a network, parsed on a loop that streams run on.
#
# bytes --too many lines, or too long ones?--> no page
#       +--slices of SLICE characters, others run between them--> Page

LINES = 4096
SAMPLES = 2048
"""Ours have 500 and 200. What is kept of a page stays in memory for a window."""
LINE = 1024
"""Characters; parsing a line takes time that grows faster than the line."""
SLICE = 1024
"""Characters that are parsed at once: within 2 ms, where they are made to be slow."""


async def read(body: bytes, slim: Callable[[str], str] = slim) -> Page:
    """``slim``: leaves the lines that are wanted. Raises ValueError for what is no page of ours."""
    if body.count(b"\n") > LINES:
        raise ValueError(f"more than {LINES} lines")
    text = slim(body.decode(errors="replace"))
    page: Page = {}
    for part in _slices(text.split("\n")):
        for name, samples in parse(part).items():
            page.setdefault(name, []).extend(samples)
        await asyncio.sleep(0)
    return page


def _slices(lines: list[str]) -> Iterator[str]:
    """Raises ValueError where lines are too many, or too long."""
    if len(lines) > SAMPLES + 1:  # the last one is empty
        raise ValueError(f"more than {SAMPLES} samples")
    part, size = list[str](), 0
    for line in lines:
        if len(line) > LINE:
            raise ValueError(f"a line of more than {LINE} characters")
        if part and size + len(line) >= SLICE:
            yield "\n".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line) + 1
    yield "\n".join(part)


# MERGED router.overview.why
# Why a process has no page, in words that are all ours.
#
# What it sent, and what it is said to be called, is on a page that people believe: none of it is
# repeated here.


def why(error: Exception) -> str:
    """What became of a request: "cannot be reached: Connection refused"."""
    if isinstance(error, aiohttp.InvalidURL):
        return "is no address: expected http://HOST:PORT"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"cannot be reached: TLS: {_distrust(error.certificate_error)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot be reached: {_broken(error.os_error)}"
    if isinstance(error, OSError):
        return f"cannot be reached: {_broken(error)}"
    if isinstance(error, aiohttp.ClientError):
        return f"does not speak HTTP ({type(error).__name__})"
    return f"cannot be asked ({type(error).__name__})"


def names_another(error: Exception) -> bool:
    """Of a certificate that is refused: it is for another host."""
    return getattr(error, "verify_code", None) in _HOSTNAME_MISMATCH


_HOSTNAME_MISMATCH = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH of OpenSSL


def _distrust(error: Exception) -> str:
    if names_another(error):  # OpenSSL's own text has the name in it
        return "its certificate is for another host"
    return str(getattr(error, "verify_message", "its certificate is not believed"))


def _broken(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or 'handshake failed').replace('_', ' ').lower()}"
    if isinstance(error, gaierror):
        return "no such host"
    return os.strerror(error.errno) if error.errno else "connection lost"


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

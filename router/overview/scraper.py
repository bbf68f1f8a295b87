"""Fetches the metrics pages of many processes at the same time.

The scraper has no secret of the cluster. Every page has a deadline and a maximum size, and its
content is checked like anything from a network, so that one bad process does not hide the others.
Plain HTTP is used on this machine only: addresses come from Redis, and a writer there must not be
able to choose where this process connects to.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from socket import gaierror
from typing import Any, NamedTuple

import aiohttp
import msgspec

from protocol.endpoints.grpc_endpoints import host_of
from protocol.errors import BatonError
from protocol.security.listen_hosts import is_loopback
from router.overview.prometheus_text import (
    MetricsPage,
    MetricsSnapshot,
    drop_unused_lines,
    read_page,
)

BATCH = 8
BATCH_DELAY_S = 0.01
"""Delay between batches of requests: streams may run on this event loop, and each start takes
time."""

_KEY_HINT = "; set BATON_API_KEY to a key that it knows, with the scope monitor"


class ScrapeError(BatonError):
    """A router or another process has no page; ``why`` is the reason without its address."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{url} {why}")
        self.why = why


class CertificateNameMismatch(ScrapeError):
    """The certificate is from a trusted CA, but for another host."""


class TargetGroup(msgspec.Struct, frozen=True):
    """One element of ``/sd`` (Prometheus ``http_sd_configs``): one process with metrics."""

    targets: list[str]
    labels: dict[str, str]

    def label(self, name: str) -> str:
        """Return Baton's label about the process; empty where it has none."""
        return self.labels.get(f"__meta_baton_{name}", "")

    @property
    def target(self) -> str:
        return self.targets[0]


class ScrapeResult(msgspec.Struct, frozen=True):
    """All known processes, and the pages of those that answered."""

    groups: list[TargetGroup]
    snapshot: MetricsSnapshot
    silent: dict[str, str]  # target -> why there is no page


class ScrapeLimits(NamedTuple):
    """Limits for one page."""

    deadline_s: float
    size: int  # bytes


class MetricsScraper:
    """Scrapes metrics pages through one connection pool; used as ``async with``.

    ``tls`` is presented to processes that require certificates. They must prove ``name``, or their
    address where it is None. ``trust`` is a hint added to errors about untrusted certificates.
    ``slim`` drops the lines of a page that are not needed. ``clock``: monotonic.
    """

    def __init__(
        self,
        limits: ScrapeLimits,
        *,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        trust: str = "",
        slim: Callable[[str], str] = drop_unused_lines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._slim, self._clock = slim, clock
        self._limits, self._tls, self._trust = limits, tls, trust
        self._parsing = asyncio.Lock()
        self._client: aiohttp.ClientSession

    async def __aenter__(self) -> MetricsScraper:
        timeout = aiohttp.ClientTimeout(total=self._limits.deadline_s)
        self._client = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._client.close()

    async def scrape(self, groups: list[TargetGroup]) -> ScrapeResult:
        """Fetch the pages of all ``groups`` now."""
        fetches = (self._page(group, i // BATCH * BATCH_DELAY_S) for i, group in enumerate(groups))
        pages = await asyncio.gather(*fetches, return_exceptions=True)
        found: dict[str, MetricsPage] = {}
        silent: dict[str, str] = {}
        for group, page in zip(groups, pages, strict=True):
            if isinstance(page, ScrapeError):
                silent[group.target] = page.why
            elif isinstance(page, Exception):
                silent[group.target] = describe_error(page)
            elif isinstance(page, BaseException):
                raise page
            else:
                found[group.target] = page
        snapshot = MetricsSnapshot(self._clock(), found, frozenset(silent))
        return ScrapeResult(groups, snapshot, silent)

    async def _page(self, group: TargetGroup, after_s: float) -> MetricsPage:
        await asyncio.sleep(after_s)
        scheme = group.labels.get("__scheme__", "http")
        url = f"{scheme}://{group.target}/metrics"
        if scheme != "https" and not is_loopback(host_of(group.target)):
            raise ScrapeError(url, "is not read: on another machine it must use https")
        body = await self.get(url, {}, self.name)
        async with self._parsing:  # one page at a time
            try:
                return await read_page(body, self._slim)
            except ValueError:  # its text quotes the page
                raise ScrapeError(url, "is not a page of metrics") from None

    async def get(
        self,
        url: str,
        headers: dict[str, str],
        name: str | None,
        tls: ssl.SSLContext | None = None,
    ) -> bytes:
        """Return the body at ``url``. The certificate must be for ``name``, or for the URL's host
        where it is None. ``tls`` replaces the context of metrics ports. Raises ScrapeError."""
        try:
            async with self._client.get(
                url,
                headers=headers,
                ssl=tls or self._tls or True,
                server_hostname=name,
                allow_redirects=False,
            ) as reply:
                if reply.status != 200:
                    hint = _KEY_HINT * (reply.status in (401, 403))
                    raise ScrapeError(url, f"answers {reply.status}{hint}")
                return await self._body(url, reply)
        except TimeoutError:
            late = f"does not answer within {self._limits.deadline_s:g} s"
            raise ScrapeError(url, late) from None
        except aiohttp.ClientConnectorCertificateError as error:
            mismatch = is_hostname_mismatch(error.certificate_error)
            kind = CertificateNameMismatch if mismatch else ScrapeError
            raise kind(url, describe_error(error) + self._trust) from None
        except aiohttp.ClientSSLError as error:
            raise ScrapeError(url, describe_error(error) + self._trust) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ScrapeError(url, describe_error(error)) from None

    async def _body(self, url: str, reply: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for part in reply.content.iter_any():
            body += part
            if len(body) > self._limits.size:
                raise ScrapeError(url, f"sends more than {self._limits.size >> 10} KiB")
        return bytes(body)


def describe_error(error: Exception) -> str:
    """Describe a failed request: "cannot be reached: Connection refused".

    The text is shown on a page that people trust, so it repeats nothing that the process sent, and
    not the name that it is listed under."""
    if isinstance(error, aiohttp.InvalidURL):
        return "is not an address: expected http://HOST:PORT"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"cannot be reached: TLS: {_describe_distrust(error.certificate_error)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot be reached: {_describe_os_error(error.os_error)}"
    if isinstance(error, OSError):
        return f"cannot be reached: {_describe_os_error(error)}"
    if isinstance(error, aiohttp.ClientError):
        return f"does not speak HTTP ({type(error).__name__})"
    return f"cannot be read ({type(error).__name__})"


def is_hostname_mismatch(error: Exception) -> bool:
    """Return whether a certificate was refused because it is for another host."""
    return getattr(error, "verify_code", None) in _HOSTNAME_MISMATCH


_HOSTNAME_MISMATCH = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH of OpenSSL


def _describe_distrust(error: Exception) -> str:
    if is_hostname_mismatch(error):  # OpenSSL's own text contains the name
        return "its certificate is for another host"
    return str(getattr(error, "verify_message", "its certificate is not signed by a trusted CA"))


def _describe_os_error(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or 'handshake failed').replace('_', ' ').lower()}"
    if isinstance(error, gaierror):
        return "no such host"
    return os.strerror(error.errno) if error.errno else "connection lost"

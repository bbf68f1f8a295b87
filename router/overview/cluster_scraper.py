"""Scrapes a cluster: asks a router's ``/sd`` for all processes, then each process for its metrics.

``baton status`` uses ``ClusterScraper``. ``MetricsTls`` is for scrapers that run inside a cluster:
the router's own overview and the autoscaler.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import Any

import msgspec

from protocol.errors import StartupError
from protocol.security.certificates import PemBundle
from protocol.security.tls import TlsFiles, TlsIdentity, load_cert_chain
from router.overview.scraper import (
    CertificateNameMismatch,
    MetricsScraper,
    ScrapeError,
    ScrapeLimits,
    ScrapeResult,
    TargetGroup,
)

STATUS_LIMITS = ScrapeLimits(deadline_s=3.0, size=8 << 20)

_TRUST_HINT = (
    "; --ca-file, or --tls-ca, --tls-cert and --tls-key, or --config select the trusted CA"
)

_target_groups = msgspec.json.Decoder(list[TargetGroup])


class ClusterScraper:
    """Scrapes the cluster of one router; used as ``async with``.

    ``api_key`` is sent to the router only. ``tls`` and ``name``: see ``MetricsScraper``. The router
    may prove its URL's host or ``name``: clients reach it by any address. ``router_tls``: what is
    trusted in the router's HTTPS certificate; ``tls`` by default.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        router_tls: ssl.SSLContext | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._router_tls = router_tls or tls
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._scraper = MetricsScraper(STATUS_LIMITS, tls=tls, name=name, trust=_TRUST_HINT)
        self._router_name: str | None = None

    async def __aenter__(self) -> ClusterScraper:
        await self._scraper.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._scraper.__aexit__(*exc_info)

    async def scrape(self) -> ScrapeResult:
        """Scrape all processes. Raises ScrapeError if the router does not list them."""
        url = f"{self.url}/sd"
        try:
            groups = [g for g in _target_groups.decode(await self._get(url)) if g.targets]
        except msgspec.DecodeError as error:
            raise ScrapeError(url, f"is not Baton's: {error}") from None
        return await self._scraper.scrape(groups)

    async def _get(self, url: str) -> bytes:
        try:
            return await self._ask(url)
        except CertificateNameMismatch:
            if self._router_name == self._scraper.name:
                raise
        self._router_name = self._scraper.name
        return await self._ask(url)

    async def _ask(self, url: str) -> bytes:
        return await self._scraper.get(url, self._headers, self._router_name, self._router_tls)


class MetricsTls:
    """TLS towards the metrics ports of a cluster: only the cluster's CA is trusted, no public one.

    Renewed files are used from the next scrape on. Raises StartupError for unusable files.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.name = files.name
        self._files, self._identity = files, TlsIdentity(files)
        version, pems = self._identity.current()
        self._used, self._context = version, _context(files, pems)

    def context(self) -> ssl.SSLContext:
        """Return the context for new connections."""
        version, pems = self._identity.current()
        if version != self._used:
            # Files may be half replaced: the last ones stay in use until the next scrape.
            with contextlib.suppress(StartupError):
                self._context, self._used = _context(self._files, pems), version
        return self._context


def _context(files: TlsFiles, pems: PemBundle) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load_cert_chain(context, files.cert, files.key, "tls")
    context.load_verify_locations(cadata=pems.ca.decode("ascii", "ignore"))  # less comments
    return context

"""Checks that a router that was just started answers; called at the end of `baton up`."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from urllib.parse import urlsplit

from cluster.local.start_report import ReportWaiting, WaitReporter
from protocol.errors import StartupError
from protocol.security.tls import HttpTls

_POLL_S = 0.1


class RouterProbe:
    """Sends requests to the router at ``url``.

    ``tls``: the router's certificate, which is trusted and may name other hosts."""

    def __init__(self, url: str, tls: HttpTls | None) -> None:
        self.url = url
        self._tls = tls

    def wait_until_answering(
        self, model_id: str, deadline_s: float, report: ReportWaiting, *, keys: bool
    ) -> int:
        """Wait for /ready, stream one completion, and return the number of its parts.

        With ``keys`` a completion needs an API key, so none is sent and the result is 0. Raises
        StartupError at the deadline or when the completion fails."""
        end = time.monotonic() + deadline_s
        wait_reporter = WaitReporter(report, end)
        while True:
            status, answer = self._get("/ready")
            if status == 200:
                break
            if time.monotonic() > end:
                raise StartupError(f"the router is not ready: {answer[:500]}")
            wait_reporter(["router"])
            time.sleep(_POLL_S)
        return 0 if keys else self._stream(model_id, max(5.0, end - time.monotonic()))

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection to the router, which the caller closes."""
        where = urlsplit(self.url)
        assert where.hostname is not None
        if self._tls is None:
            return http.client.HTTPConnection(where.hostname, where.port, timeout=timeout_s)
        context = ssl.create_default_context(cafile=self._tls.cert)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return http.client.HTTPSConnection(
            where.hostname, where.port, timeout=timeout_s, context=context
        )

    def _get(self, path: str) -> tuple[int, str]:
        connection = self.connection(5.0)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read(10_000).decode(errors="replace")
        except (OSError, http.client.HTTPException) as e:
            return 0, f"{self.url}{path} does not answer: {e}"
        finally:
            connection.close()

    def _stream(self, model_id: str, timeout_s: float) -> int:
        body = {"model": model_id, "prompt": "def", "max_tokens": 4, "stream": True}
        connection = self.connection(timeout_s)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as e:
            raise StartupError(f"a test completion failed: {e}") from e
        finally:
            connection.close()
        parts = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if response.status != 200 or not parts or parts[-1] != "[DONE]" or '"error"' in text:
            raise StartupError(f"a test completion failed: HTTP {response.status}: {text[:500]}")
        return len(parts) - 1

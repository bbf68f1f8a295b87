"""A pool with several routers over the same workers, one for each policy or setting."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from bench.standalone import Standalone
from cluster.ports import any_free

_START_S = 60.0


class Routers(Standalone):
    """``options``: of each router, by its name. ``at``: their addresses."""

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Sequence[str]],
        worker_options: Sequence[str] = (),
    ) -> None:
        (first, of_first), *self._others = options.items()
        super().__init__(folder, worker_options=worker_options, router_options=of_first)
        self.at = {first: self.url}
        self._processes: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        await super().start()
        for name, options in self._others:
            [port] = any_free("127.0.0.1", 1)
            self._processes.append(self._baton("router", "--port", str(port), *options))
            self.at[name] = f"http://127.0.0.1:{port}"
            await self._serves(self.at[name])

    async def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        await super().close()

    async def _serves(self, url: str) -> None:
        """Until this router is attached to every decode worker."""
        wanted = self.roles.count("decode")
        async with asyncio.timeout(_START_S), aiohttp.ClientSession() as http:
            while await _decode_workers(http, url) != wanted:
                await asyncio.sleep(0.1)


async def _decode_workers(http: aiohttp.ClientSession, url: str) -> int:
    try:
        async with http.get(f"{url}/ready") as response:
            return int((await response.json()).get("decode_workers", 0))
    except aiohttp.ClientError:
        return 0

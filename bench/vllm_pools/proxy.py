"""The proxy that vLLM's split needs: the prompt to one server, then the answer from the other.

    python -m bench.vllm_pools.proxy PORT PREFILL_URL DECODE_URL

The prefill server gets the request for one token and tells where the KV lies; the decode server
gets the request with that, and its stream is passed on as it comes (vLLM, "NixlConnector Usage
Guide"). It runs in a process of its own, as Baton's router does.
"""

from __future__ import annotations

import sys
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

PATH = "/v1/completions"
WAIT = aiohttp.ClientTimeout(total=300.0)
KEEP_ALIVE_S = 2.0
"""Below vLLM's 5 s: a connection that the server is just closing would fail a request."""
WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
HTTP: web.AppKey[aiohttp.ClientSession] = web.AppKey("http", aiohttp.ClientSession)


async def prefill(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    """Compute the prompt; return the parameters with which its KV is fetched."""
    asked = {k: v for k, v in body.items() if k != "stream_options"}
    asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": WANTED}
    async with http.post(url + PATH, json=asked) as answer:
        answer.raise_for_status()
        return (await answer.json())["kv_transfer_params"]


async def healthy(_: web.Request) -> web.Response:
    return web.Response()


def application(prefill_url: str, decode_url: str) -> web.Application:
    async def complete(request: web.Request) -> web.StreamResponse:
        http, body = request.app[HTTP], msgspec.json.decode(await request.read())
        body["kv_transfer_params"] = await prefill(http, prefill_url, body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        async with http.post(decode_url + PATH, data=msgspec.json.encode(body)) as answer:
            answer.raise_for_status()
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
        await response.write_eof()
        return response

    async def session(app: web.Application) -> Any:
        headers = {"content-type": "application/json"}
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        http = aiohttp.ClientSession(headers=headers, timeout=WAIT, connector=connector)
        app[HTTP] = http
        async with http:
            yield

    app = web.Application()
    app.cleanup_ctx.append(session)
    app.router.add_post(PATH, complete)
    app.router.add_get("/health", healthy)
    return app


if __name__ == "__main__":
    port, first, second = sys.argv[1:]
    web.run_app(application(first, second), host="127.0.0.1", port=int(port), print=None)

"""Web pages of other origins: which may ask, and what a browser is told about it."""

from __future__ import annotations

from tests.router.conftest import MODEL, Cluster, Start
from tests.router.fake_worker import outputs

PAGE = "https://chat.example:8443"
OTHER = "https://evil.example"
ALLOWED = "access-control-allow-origin"
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models", "/none")


async def preflight(
    cluster: Cluster, path: str, origin: str, wanted: str = "authorization"
) -> dict[str, str]:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }
    reply = await cluster.client.options(path, headers=headers)
    assert (reply.status_code, reply.content) == (204, b"")
    assert reply.headers["x-request-id"]
    return dict(reply.headers)


async def test_an_allowed_page_may_ask_and_read(start: Start) -> None:
    cluster = await start(
        outputs(), cors_origins=("https://a.example", "https://Chat.example:8443")
    )
    for path in PATHS:
        told = await preflight(cluster, path, PAGE, "authorization, x-stainless-os")
        assert told[ALLOWED] == PAGE and told["vary"] == "origin"
        assert told["access-control-allow-headers"] == "authorization, x-stainless-os"
        assert "POST" in told["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in told
    for stream in (False, True):
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 2, "stream": stream}
        reply = await cluster.client.post("/v1/completions", json=body, headers={"origin": PAGE})
        assert (reply.status_code, reply.headers[ALLOWED]) == (200, PAGE)
        assert "x-request-id" in reply.headers["access-control-expose-headers"]


async def test_errors_can_be_read_by_the_page(start: Start) -> None:
    cluster = await start(cors_origins=(PAGE,))
    body = {"model": MODEL, "prompt": "hi"}
    for path, sent, status in (
        ("/v1/completions", body, 503),
        ("/v1/completions", {}, 400),
        ("/none", body, 404),
    ):
        reply = await cluster.client.post(path, json=sent, headers={"origin": PAGE})
        assert (reply.status_code, reply.headers[ALLOWED]) == (status, PAGE)


async def test_other_pages_learn_nothing(start: Start) -> None:
    cluster = await start(outputs(), cors_origins=(PAGE,))
    for origin in (OTHER, "null", PAGE + ".evil.example", "http://chat.example:8443"):
        told = await preflight(cluster, "/v1/completions", origin)
        assert not any(name.startswith("access-control") for name in told)
        assert told["vary"] == "origin"
        reply = await cluster.client.get("/v1/models", headers={"origin": origin})
        assert ALLOWED not in reply.headers and reply.headers["vary"] == "origin"


async def test_any_origin(start: Start) -> None:
    cluster = await start(cors_origins=("*",))
    assert (await preflight(cluster, "/v1/completions", OTHER))[ALLOWED] == "*"
    assert (await cluster.client.get("/health")).headers[ALLOWED] == "*"


async def test_header_names_that_are_not_names_are_not_repeated(start: Start) -> None:
    cluster = await start(cors_origins=("*",))
    for wanted in ("a\tb", "a;b", "x" * 5000):
        told = await preflight(cluster, "/v1/completions", OTHER, wanted)
        assert "access-control-allow-headers" not in told


async def test_options_without_an_origin_is_no_preflight(start: Start) -> None:
    cluster = await start(cors_origins=("*",))
    assert (await cluster.client.options("/v1/completions")).status_code == 405
    reply = await cluster.client.options("/v1/completions", headers={"origin": PAGE})
    assert reply.status_code == 405

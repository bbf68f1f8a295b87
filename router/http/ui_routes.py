"""Routes of the live page ``/ui`` and its files; installed by ``create_app``.

The page loads nothing from other hosts and runs only its own script (CSP level 3,
https://www.w3.org/TR/CSP3/), because the names of workers in it are not trusted.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib import resources
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from router.http.state import RouterState
from router.tenants.key_store import authorization_of

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

PAGE = "page.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class StaticFile(NamedTuple):
    """One file of the page, as it is sent."""

    body: bytes
    compressed: bytes  # by gzip
    content_type: str
    etag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Return the files of the page by name."""
    found = {}
    for entry in resources.files("router.ui").joinpath("static").iterdir():
        content_type = CONTENT_TYPES.get(entry.name[entry.name.rfind(".") :])
        if content_type is not None:
            body = entry.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[entry.name] = StaticFile(body, gzip.compress(body, mtime=0), content_type, tag)
    return found


def install_ui_routes(app: FastAPI) -> None:
    routes = (
        ("/", to_page),
        ("/ui", page),
        ("/ui/overview", overview),
        ("/ui/{file}", static_file),
    )
    for path, answer in routes:
        app.add_api_route(path, answer, methods=["GET", "HEAD"])


async def to_page(request: Request) -> Response:
    """Redirect a browser to the page; the location is relative, for proxies that add a prefix. HEAD
    gets a 200: Claude Code asks in this way whether the server can be reached."""
    if request.method == "HEAD":
        return Response(headers=SECURITY_HEADERS)
    return Response(status_code=307, headers={**SECURITY_HEADERS, "location": "ui"})


async def page(request: Request) -> Response:
    return _file_response(request, static_files()[PAGE])


async def static_file(request: Request, file: str) -> Response:
    found = static_files().get(file)
    if found is None or file == PAGE:
        raise HTTPException(404)
    return _file_response(request, found)


async def overview(request: Request) -> Response:
    state = request.app.state.router
    assert isinstance(state, RouterState)
    state.tenants.authenticate(authorization_of(request.headers), "monitor")
    headers = {**SECURITY_HEADERS, "cache-control": "no-store"}
    body = await state.live_overview.overview()
    return Response(body, headers=headers, media_type="application/json")


def _file_response(request: Request, file: StaticFile) -> Response:
    headers = {
        **SECURITY_HEADERS,
        "cache-control": "no-cache",
        "etag": file.etag,
        "vary": "accept-encoding",
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    headers["content-type"] = file.content_type
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(file.body, headers=headers)
    return Response(file.compressed, headers={**headers, "content-encoding": "gzip"})

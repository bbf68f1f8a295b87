"""The page and its parts over HTTP.

Nothing is taken from elsewhere, and nothing in the page but its own script runs (CSP, level 3:
https://www.w3.org/TR/CSP3/): what workers call themselves is text, whatever they write there.
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

SECURITY = {
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
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class File(NamedTuple):
    body: bytes
    small: bytes  # the same by gzip
    kind: str
    tag: str  # changes with the body


@cache
def files() -> dict[str, File]:
    """All parts of the page by name."""
    found = {}
    for entry in resources.files("router.ui").joinpath("static").iterdir():
        kind = KINDS.get(entry.name[entry.name.rfind(".") :])
        if kind is not None:
            body = entry.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[entry.name] = File(body, gzip.compress(body, mtime=0), kind, tag)
    return found


def install(app: FastAPI) -> None:
    for path, answer in (("/ui", page), ("/ui/overview", overview), ("/ui/{file}", part)):
        app.add_api_route(path, answer, methods=["GET", "HEAD"])


async def page(request: Request) -> Response:
    return _sent(request, files()[PAGE])


async def part(request: Request, file: str) -> Response:
    found = files().get(file)
    if found is None or file == PAGE:
        raise HTTPException(404)
    return _sent(request, found)


async def overview(request: Request) -> Response:
    state = request.app.state.router
    assert isinstance(state, RouterState)
    state.tenants.of(request.headers.get("authorization"))
    headers = {**SECURITY, "cache-control": "no-store"}
    return Response(await state.viewing.overview(), headers=headers, media_type="application/json")


def _sent(request: Request, file: File) -> Response:
    headers = {**SECURITY, "cache-control": "no-cache", "etag": file.tag, "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    headers["content-type"] = file.kind
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(file.body, headers=headers)
    return Response(file.small, headers={**headers, "content-encoding": "gzip"})

"""What every error must be."""

from __future__ import annotations

from typing import Any

import httpx

TYPES = {
    **dict.fromkeys((400, 401, 404, 405, 408, 413, 414, 415, 431), "invalid_request_error"),
    **{429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"},
    504: "timeout_error",
}


def check(
    response: httpx.Response, status: int, param: str | None, code: str | None, says: str
) -> dict[str, Any]:
    """The error, of which ``says`` is a part."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (TYPES[status], param, code)
    assert says in error["message"]
    assert len(error["message"]) < 600
    return error

"""Bodies that are no JSON object, and what JSON allows that nobody expects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.conftest import MODEL, Start
from tests.router.errors import check
from tests.router.fake_worker import outputs

JSON = {"content-type": "application/json"}
DEEP: dict[str, Any] = {"model": MODEL, "prompt": json.loads("[" * 400 + "]" * 400)}
MESSAGE = {"role": "user", "content": "hi", "name": json.loads("[" * 400 + "]" * 400)}

# fmt: off
CASES: list[tuple[bytes, int, str | None, str | None, str]] = [
    (b"{", 400, None, "invalid_json", "the body is not valid JSON: it ends too"),
    (b'{"prompt": NaN}', 400, None, "invalid_json", "the body is not valid JSON: invalid"),
    (b'{"a": 1e999}', 400, None, "invalid_json", "the body is not valid JSON: Number out of"),
    (b'{"prompt": "\\ud800"}',
     400, None, "invalid_json", "the body is not valid JSON: it ends too"),
    (b'{"prompt": "\\udc00 x"}',
     400, None, "invalid_json", "the body is not valid JSON: invalid utf-16"),
    (b'{"prompt": "\xff"}',
     400, None, "invalid_json", "the body is not valid JSON: a string in it"),
    (b"[" * 2000, 400, None, "invalid_json", "the body is nested too deeply"),
    (b"[1]", 400, None, "invalid_json", "the body must be a JSON object, not an array"),
    (b'"x"', 400, None, "invalid_json", "the body must be a JSON object, not a string"),
    (b"null", 400, None, "invalid_json", "the body must be a JSON object, not null"),
    (b"true", 400, None, "invalid_json", "the body must be a JSON object, not a"),
    (b"{} x", 400, None, "invalid_json", "the body is not valid JSON: trailing"),
    (b"{'a': 1}", 400, None, "invalid_json", "the body is not valid JSON: object keys"),
    (b"\xef\xbb\xbf{}", 400, None, "invalid_json", "the body is not valid JSON: invalid"),
    (b'{"seed": ' + b"9" * 5000 + b"}",
     400, None, "invalid_json", "the body is not valid JSON: Integer value"),
    (b"", 400, None, "invalid_json", "the body is empty; expected a JSON object"),
    (b'{"model": "tiny", "prompt": [' + b"9" * 400 + b"]}", 400, "prompt", None, "ends at"),
    (json.dumps({"prompt": "hi"}).encode("utf-16"), 400, None, "invalid_json", "(byte 0)"),
    (json.dumps(DEEP).encode(), 400, "prompt", None, "must be a token id"),
]
# fmt: on


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("body", "status", "param", "code", "says"), CASES)
async def test_refusals(
    start: Start,
    path: str,
    body: bytes,
    status: int,
    param: str | None,
    code: str | None,
    says: str,
) -> None:
    cluster = await start(outputs())
    if code != "invalid_json" and "chat" in path:
        body = json.dumps({"model": MODEL, "messages": [MESSAGE]}).encode()
        param, says = "messages[0].name", "must be a string"
    response = await cluster.client.post(path, content=body, headers=JSON)
    check(response, status, param, code, says)
    assert not cluster.workers[0].requests


async def test_of_a_name_that_comes_twice_the_last_one_counts(start: Start) -> None:
    cluster = await start(outputs())
    body = b'{"model": "other", "prompt": "x", "max_tokens": 9, "max_tokens": 2, "model": "tiny"}'
    response = await cluster.client.post("/v1/completions", content=body, headers=JSON)
    assert response.json()["usage"]["completion_tokens"] == 2


async def test_texts_that_are_odd_but_right(start: Start) -> None:
    cluster = await start(outputs())
    odd = "\x00 \x7f \u2028 \ufeff \ufffe \U0010ffff \u202e"
    for ascii_only in (True, False):
        body = json.dumps({"model": MODEL, "prompt": odd, "max_tokens": 1}, ensure_ascii=ascii_only)
        response = await cluster.client.post(
            "/v1/completions", content=b" \n" + body.encode() + b"\t ", headers=JSON
        )
        assert response.status_code == 200, response.text

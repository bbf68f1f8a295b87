"""A hub of one's own: the calls that a download needs, over HTTP on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves ``files`` as owner/name. ``refuses``: the hub's error code for everything;
    ``stalls``: a file of which only the first half is sent; ``slow``: a file that is sent in
    ``parts``, ``pause_s`` apart; ``token``: the model is gated, and needs this token; ``resets``:
    so many times the connection of the slow file is reset in the middle of it."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        files: dict[str, bytes],
        refuses: str = "",
        stalls: str = "",
        *,
        slow: str = "",
        parts: int = 20,
        pause_s: float = 0.1,
        token: str = "",
        resets: int = 0,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.refuses, self.stalls = files, refuses, stalls
        self.slow, self.parts, self.pause_s = slow, parts, pause_s
        self.token, self.resets = token, resets
        self.fetched: list[str] = []
        self.sent = 0  # bytes of the slow file
        self.let_go = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if self.server.refuses:
            status = 403 if self.server.refuses == "GatedRepo" else 404
            return self._send(b"", body, status, {"X-Error-Code": self.server.refuses})
        if path.endswith("/auth-check"):
            return self._send(b"", body, 200, {}) if self._may() else self._refuse(body)
        if "/tree/" in path:
            files = self.server.files.items()
            return self._json([self._entry(name, data) for name, data in files], body)
        if path.startswith("/api/models/"):
            names = [{"rfilename": n, "size": len(d)} for n, d in self.server.files.items()]
            gated = "auto" if self.server.token else False
            told = {"id": "owner/name", "sha": COMMIT, "siblings": names, "gated": gated}
            return self._json(told, body)
        if not self._may():
            return self._refuse(body)
        name = path.rpartition("/")[2]
        data = self.server.files.get(name)
        if data is None:
            return self._send(b"", body, 404, {})
        if body:
            self.server.fetched.append(name)
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if body and name == self.server.slow:
            return self._send_slowly(data, headers)
        return self._send(data, body, 200, headers, stall=name == self.server.stalls)

    def _may(self) -> bool:
        given = self.headers.get("authorization", "")
        return not self.server.token or given == f"Bearer {self.server.token}"

    def _refuse(self, body: bool) -> None:
        self._send(b"", body, 401, {"X-Error-Code": "GatedRepo"})

    def _send_slowly(self, data: bytes, headers: dict[str, str]) -> None:
        self._begin(200, {**headers, "Content-Length": str(len(data))})
        part = -(-len(data) // self.server.parts)
        for at in range(0, len(data), part):
            self.wfile.write(data[at : at + part])
            self.wfile.flush()
            self.server.sent = at + part
            if self.server.resets and 2 * self.server.sent > len(data):
                self.server.resets -= 1
                self._reset()
                return
            time.sleep(self.server.pause_s)

    @staticmethod
    def _entry(name: str, data: bytes) -> dict[str, object]:
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}

    def _json(self, answer: object, body: bool) -> None:
        self._send(json.dumps(answer).encode(), body, 200, {"Content-Type": "application/json"})

    def _send(
        self, data: bytes, body: bool, status: int, headers: dict[str, str], stall: bool = False
    ) -> None:
        self._begin(status, {**headers, "Content-Length": str(len(data))})
        if body and stall:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.server.let_go.wait(20)
        elif body:
            self.wfile.write(data)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.let_go.set()
        hub.shutdown()
        hub.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

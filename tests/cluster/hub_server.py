"""A hub of one's own: the two calls that a download needs, over HTTP on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves ``files`` as owner/name. ``refuses``: the hub's error code for everything;
    ``stalls``: a file of which only the first half is sent."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, files: dict[str, bytes], refuses: str = "", stalls: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.refuses, self.stalls = files, refuses, stalls
        self.fetched: list[str] = []
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
        if "/tree/" in path:
            files = self.server.files.items()
            return self._json([self._entry(name, data) for name, data in files], body)
        if path.startswith("/api/models/"):
            names = [{"rfilename": n, "size": len(d)} for n, d in self.server.files.items()]
            return self._json({"id": "owner/name", "sha": COMMIT, "siblings": names}, body)
        name = path.rpartition("/")[2]
        data = self.server.files[name]
        if body:
            self.server.fetched.append(name)
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._send(data, body, 200, headers, stall=name == self.server.stalls)

    @staticmethod
    def _entry(name: str, data: bytes) -> dict[str, object]:
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}

    def _json(self, answer: object, body: bool) -> None:
        self._send(json.dumps(answer).encode(), body, 200, {"Content-Type": "application/json"})

    def _send(
        self, data: bytes, body: bool, status: int, headers: dict[str, str], stall: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and stall:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.server.let_go.wait(20)
        elif body:
            self.wfile.write(data)


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

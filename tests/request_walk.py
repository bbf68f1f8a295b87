"""Records which modules of the product run while a request is served, over several processes.

Each traced process has a profiling hook, which logs the first call of each function while a byte
that all processes map is not 0. Imports do not count. An engine is traced when this module is run
in place of ``cluster.worker.engine_main``. Used by ``tests/workers/test_request_walk.py``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PRODUCT = (
    "cluster",
    "decode_worker",
    "engine",
    "kvtransfer",
    "prefill_worker",
    "protocol",
    "router",
)
FOLDER = "BATON_TEST_REQUEST_WALK"
IDLE = 255


def install() -> None:
    """Log first calls of this process from now on. The folder is named by the environment."""
    folder = Path(os.environ[FOLDER])
    with (folder / "request").open("r+b") as file:
        request = mmap.mmap(file.fileno(), 1)
    log = (folder / f"{os.getpid()}.log").open("a", buffering=1)
    roots = tuple(f"{ROOT}/{package}/" for package in PRODUCT)
    seen: set[tuple[int, CodeType]] = set()

    def on_call(frame: FrameType, event: str, _arg: Any) -> None:
        current = request[0]
        if not current or event != "call":
            return
        code = frame.f_code
        if (current, code) in seen or code.co_name == "<module>":
            return
        seen.add((current, code))
        if code.co_filename.startswith(roots) and not code.co_filename.endswith("_pb2_grpc.py"):
            path = Path(code.co_filename).relative_to(ROOT)
            log.write(f"{current} {time.monotonic():.6f} {path} {code.co_qualname}\n")

    threading.setprofile(on_call)
    sys.setprofile(on_call)


class RequestWalk:
    """Traces this process and the engines that it starts, in ``with`` blocks of ``request()``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "request"
        self._file.write_bytes(b"\0")
        self._count = 0

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Install the hook here, and in engines that are started within."""
        os.environ[FOLDER] = str(self._folder)
        install()
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            del os.environ[FOLDER]

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """One request is served in this block."""
        self._count += 1
        self._mark(self._count)
        yield
        self._mark(0)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """No request is served in this block: what runs in it does not count."""
        self._mark(IDLE)
        yield
        self._mark(0)

    def _mark(self, request: int) -> None:
        with self._file.open("r+b") as file:
            file.write(bytes([request]))

    def modules(self) -> dict[str, list[str]]:
        """Return the functions that ran in all requests and not in idle time, by the path of their
        module. Modules are in the order in which the last request entered them."""
        first: dict[tuple[str, str], dict[int, float]] = {}
        for log in self._folder.glob("*.log"):
            for line in log.read_text().splitlines():
                request, at, path, function = line.split(" ", 3)
                times = first.setdefault((path, function), {})
                times[int(request)] = min(float(at), times.get(int(request), float("inf")))
        requests = set(range(1, self._count + 1))
        common = {key: times for key, times in first.items() if times.keys() == requests}
        found: dict[str, list[str]] = {}
        for path, function in sorted(common, key=lambda key: common[key][self._count]):
            found.setdefault(path, []).append(function)
        return found


if __name__ == "__main__":
    install()
    runpy.run_module("cluster.worker.engine_main", run_name="__main__")

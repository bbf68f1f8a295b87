"""Redis as others run it: on a TCP port, with a password, behind TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from cluster.local.ports import free_ports
from cluster.local.redis_server import EmbeddedRedis

PASSWORD = "s3cr+t/p%w"
QUOTED = "s3cr+t%2Fp%25w"


class TcpRedis(EmbeddedRedis):
    """``start`` and ``stop`` as usual. ``tls_port``: what the URL shows in place of its own."""

    def __init__(self, folder: Path, tls_port: int | None = None) -> None:
        super().__init__(folder)
        [self.port] = free_ports("127.0.0.1", 1)
        self._tls_port = tls_port

    @property
    def url(self) -> str:
        if self._tls_port is None:
            return f"redis://:{QUOTED}@127.0.0.1:{self.port}/0"
        return f"rediss://:{QUOTED}@127.0.0.1:{self._tls_port}/0"

    def _config(self) -> str:
        own = f"bind 127.0.0.1\nport {self.port}\nrequirepass {PASSWORD}\n"
        return super()._config().replace("port 0\n", own, 1)


def certificate(folder: Path, name: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A certificate that vouches for itself, for ``name``, and its key. Needs openssl."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName={name}"),
            *("-out", str(cert), "-keyout", str(key)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@contextlib.contextmanager
def tls_in_front(port: int, tls_port: int, cert: Path, key: Path) -> Iterator[None]:
    """TLS on ``tls_port``, plain to ``port``; on a thread of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    loop, over = asyncio.new_event_loop(), asyncio.Event()
    loop.set_exception_handler(lambda *_: None)  # clients that refuse the certificate
    listening = threading.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pump(reader, outer), _pump(inner, writer))

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", tls_port, ssl=context):
            listening.set()
            await over.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert listening.wait(5)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()

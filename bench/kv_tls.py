"""The cost of mutual TLS on the KV channel.

    python -m bench.kv_tls

The product's source and sink transfer 512 frames of 1 MiB over loopback, plain and with TLS in
turns. Both ends are in this process, so that the CPU time is that of both.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from pathlib import Path
from statistics import median

from cluster.credentials import certificates
from engine.ipc.messages import KVFrame
from engine.kv_cache.kv_format import KVPiece
from kvtransfer.frames import ExpectedFrames
from kvtransfer.receiver import KVClient
from kvtransfer.sender import KVServer
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, EndpointSecurity
from protocol.security.tls import TlsFiles

FRAMES = 512
FRAME_BYTES = 1 << 20
ROUNDS = 7
_PIECES = [KVPiece(0, 2, block, 1) for block in range(FRAMES)]


class Ends:
    """A KV source and a KV sink; every frame goes through the same slot."""

    def __init__(self, security: EndpointSecurity) -> None:
        self._source, self._sink = KVServer("token", security), KVClient("token", security)
        self._endpoint = self._source.start("127.0.0.1", 0)
        self._sent = memoryview(bytearray(secrets.token_bytes(FRAME_BYTES)))
        self._got = memoryview(bytearray(FRAME_BYTES))

    async def transfer(self) -> tuple[float, float]:
        """Run one transfer, and return its seconds and CPU seconds."""
        name = secrets.token_bytes(16)
        outlet = self._source.open(name, lambda _, size: self._sent[:size])
        for i, piece in enumerate(_PIECES):
            last = i == FRAMES - 1
            outlet.put(KVFrame(1, i, 0, piece, FRAME_BYTES, last=last), lambda: None)
        expectation = ExpectedFrames(name, _PIECES, FRAME_BYTES // 2)
        began, cpu = time.perf_counter(), time.process_time()
        pull = self._sink.open(
            self._endpoint, expectation, lambda _, size: self._got[:size], lambda *_: None
        )
        for _ in range(FRAMES):
            pull.add_slot(0)
        await self._sink.read_to_end(pull)
        spent = time.perf_counter() - began, time.process_time() - cpu
        self._source.close(outlet)
        return spent

    def close(self) -> None:
        self._sink.close()
        self._source.stop()


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"plain": Ends(LOOPBACK_ONLY), "TLS": Ends(_with_tls(Path(folder)))}
        spent: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind, ends in kinds.items():
                spent[kind].append(await ends.transfer())
        for ends in kinds.values():
            ends.close()
    gigabytes = FRAMES * FRAME_BYTES / 1e9
    for kind, times in spent.items():
        rate = gigabytes * 1000 / median(seconds for seconds, _ in times)
        cpu = median(cpu for _, cpu in times) / gigabytes
        print(f"{kind:6} {rate:5.0f} MB/s  {cpu:.2f} CPU s/GB")


def _with_tls(folder: Path) -> EndpointSecurity:
    certificates.create_ca(folder, [])
    ca, cert, key = (str(folder / name) for name in ("ca.pem", "localhost.pem", "localhost.key"))
    return EndpointSecurity(TlsFiles(ca=ca, cert=cert, key=key))


if __name__ == "__main__":
    asyncio.run(main())

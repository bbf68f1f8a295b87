"""What workers say to those who may not call them. Run on a machine of the network:

    python -m tests.e2e.hosts.knock FOLDER

FOLDER has ca.pem, node.pem, node.key; the environment has BATON_TOKEN and BATON_REDIS_URL. Prints,
as JSON, how a call of Prefill/Run ends for each kind of caller, by the workers' endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from protocol.registry.directory import Directory
from protocol.registry.redis_client import connect
from protocol.security import cluster_token
from protocol.wire.wire_pb2_grpc import PrefillStub

_CLUSTER_NAME = "baton.cluster"
_WAIT_S = 5.0


def knock(folder: Path, endpoint: str, token: str) -> dict[str, str]:
    """Status codes, by who called."""
    ca, cert, key = ((folder / name).read_bytes() for name in ("ca.pem", "node.pem", "node.key"))
    stranger = grpc.ssl_channel_credentials(ca)
    member = grpc.ssl_channel_credentials(ca, key, cert)
    return {
        "no TLS": _code(grpc.insecure_channel(endpoint), cluster_token.token_metadata(token)),
        "no certificate": _code(_channel(endpoint, stranger), cluster_token.token_metadata(token)),
        "no token": _code(_channel(endpoint, member), ()),
        "another token": _code(
            _channel(endpoint, member), cluster_token.token_metadata("0" * len(token))
        ),
        "a worker": _code(_channel(endpoint, member), cluster_token.token_metadata(token)),
    }


def _channel(endpoint: str, credentials: grpc.ChannelCredentials) -> grpc.Channel:
    options = [("grpc.ssl_target_name_override", _CLUSTER_NAME)]
    return grpc.secure_channel(endpoint, credentials, options)


def _code(channel: grpc.Channel, metadata: Sequence[tuple[str, str]]) -> str:
    """How a call that says nothing ends."""
    with channel:
        call = PrefillStub(channel).Run(iter(()), metadata=tuple(metadata), timeout=_WAIT_S)
        with contextlib.suppress(grpc.RpcError):  # its code says it
            list(call)
        return str(call.code().name)


async def _endpoints(url: str) -> list[str]:
    client = connect(url)
    try:
        return [record.endpoint for record in await Directory(client, "default").workers.all()]
    finally:
        await client.aclose()


def main() -> None:
    folder, token = Path(sys.argv[1]), os.environ["BATON_TOKEN"]
    endpoints = asyncio.run(_endpoints(os.environ["BATON_REDIS_URL"]))
    print(json.dumps({endpoint: knock(folder, endpoint, token) for endpoint in endpoints}))


if __name__ == "__main__":
    main()

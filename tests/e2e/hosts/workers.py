"""The workers of the cluster, as its directory has them. Run on a machine of the network:

    python -m tests.e2e.hosts.workers FOLDER

Prints, as JSON, a list of {instance, role, endpoint, pid}. The environment is that of ``knock``.
"""

from __future__ import annotations

import asyncio
import json
import os

from protocol.registry.directory import Directory, WorkerRecord
from protocol.registry.redis_client import connect


async def _records() -> list[WorkerRecord]:
    client = connect(os.environ["BATON_REDIS_URL"])
    try:
        return await Directory(client, "default").workers.all()
    finally:
        await client.aclose()


def main() -> None:
    names = ("instance", "role", "endpoint", "pid")
    records = asyncio.run(_records())
    print(json.dumps([{name: getattr(r, name) for name in names} for r in records]))


if __name__ == "__main__":
    main()

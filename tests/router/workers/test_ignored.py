"""Workers that are listed and not used are logged once, and forgotten when they are gone."""

from __future__ import annotations

import logging

import msgspec
import pytest

from protocol.registry.directory import ModelInfo, WorkerRecord
from router.workers.pool import WorkerPool
from tests.router.conftest import MODEL
from tests.router.fake_worker import TOKEN


async def test_ignored_workers_that_are_gone_are_forgotten(
    model_info: ModelInfo, caplog: pytest.LogCaptureFixture
) -> None:
    listed: list[WorkerRecord] = []

    async def list_workers() -> list[WorkerRecord]:
        return listed

    def elsewhere(instance: str) -> WorkerRecord:
        """A worker on another host, which a router without TLS does not use."""
        return WorkerRecord(
            instance=instance,
            role="prefill",
            endpoint="192.0.2.1:1",
            kv_endpoint="192.0.2.1:2",
            model=model_info,
            pid=1,
            engine_pid=2,
        )

    pool = WorkerPool(list_workers, model_id=MODEL, token=TOKEN, refresh_s=60.0)
    stays = elsewhere("stays")
    with caplog.at_level(logging.WARNING):
        for number in range(300):
            other = msgspec.structs.replace(model_info, fingerprint=f"{number:032}")
            restarted = elsewhere(f"started-{number}")
            listed[:] = [stays, restarted, msgspec.structs.replace(restarted, model=other)]
            await pool.refresh()
    assert pool._ignored._logged == {"stays", "started-299"}
    messages = [record.message for record in caplog.records if "ignoring" in record.message]
    assert len(messages) == 301, "each one once, however often it is listed"
    await pool.close()

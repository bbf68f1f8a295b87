"""A caller that opens a call and says nothing holds it for a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import pytest

from prefill_worker import service as module
from prefill_worker.service import PrefillService
from protocol.wire import wire_pb2 as pb


class Aborted(Exception):
    """The call was ended with this status."""


class Context:
    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Aborted(code, details)


async def test_call_without_a_first_message_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_MESSAGE_S", 0.02)
    left: Any = None
    service = PrefillService(left, [], left, "p")

    async def calls() -> AsyncIterator[pb.PrefillCall]:
        await asyncio.Event().wait()
        yield pb.PrefillCall()

    context: Any = Context()
    async with asyncio.timeout(5):
        with pytest.raises(Aborted) as aborted:
            await anext(service.Run(calls(), context))
    assert aborted.value.args[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert service.calls == 0

"""A call that breaks after this worker itself stood still is no death of the other worker."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from kvtransfer.prefill_call import PrefillRunCall
from protocol.errors import PeerLost, TransferFailed


@pytest.mark.parametrize("paused", [False, True])
async def test_a_broken_call_is_a_death_unless_this_worker_stood_still(
    monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    left: Any = None
    call = PrefillRunCall(left, left, lambda event: None)
    call._accepted = True
    monkeypatch.setattr(call._silence, "after_own_pause", lambda: paused)
    metadata = grpc.aio.Metadata()
    broken = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "ping timeout")
    failure = call._failure(broken)
    assert type(failure) is (TransferFailed if paused else PeerLost)
    assert paused or (isinstance(failure, PeerLost) and failure.at_work)

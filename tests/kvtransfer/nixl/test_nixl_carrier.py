"""Whole transfers with the carrier ``nixl``: real control calls, carriers and movers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kvtransfer.carrier import Carrier
from kvtransfer.carriers.grpc_carrier import GrpcCarrier
from kvtransfer.carriers.nixl_carrier import NixlCarrier
from kvtransfer.nixl.mover_process import MoverProcess
from kvtransfer.nixl.package import NixlPackage, find_nixl
from protocol.errors import CarrierFailed, TransferFailed
from protocol.wire import wire_pb2 as pb
from tests.kvtransfer.fronts import TOKEN, Front, receiving, started
from tests.kvtransfer.nixl.movers import (
    TRANSPORTS,
    FakeSession,
    command,
    mover_processes,
    package,
    pid,
)

WARM_UP_S = 20.0


def nixl_carrier() -> NixlCarrier:
    return NixlCarrier(package(), trusted=True, command=command())


@asynccontextmanager
async def nixl_fronts(transport: str = "tcp") -> AsyncIterator[tuple[Front, Front]]:
    """A sender and a receiver that have carried a prompt by nixl; nothing is left afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", TRANSPORTS[transport])
        carriers: list[list[Carrier]] = [[nixl_carrier(), GrpcCarrier(TOKEN)] for _ in range(2)]
    sender, receiver = (Front(own) for own in carriers)
    async with started(sender, receiver):
        await carry_by_nixl(sender, receiver)
        yield sender, receiver
        await sender.all_slots_free()
        await receiver.all_slots_free()
    assert not mover_processes(), "a mover is left"


async def carry_by_nixl(sender: Front, receiver: Front) -> None:
    """Repeat a transfer until nixl carries it: while the sender's mover starts, grpc does."""
    async with asyncio.timeout(WARM_UP_S):
        carrier = ""
        while carrier != "nixl":
            transfer = receiving(receiver)
            await transfer.run(sender.endpoint)
            assert transfer.complete
            carrier = transfer.carrier


def reading_mover(front: Front) -> MoverProcess:
    return cast(MoverProcess, cast(Any, front.carriers[0])._reader._mover)


def serving_mover(front: Front) -> MoverProcess:
    return cast(MoverProcess, cast(Any, front.carriers[0])._server._mover)


@pytest.mark.parametrize("transport", list(TRANSPORTS))
async def test_prompts_are_carried_whole_64_at_once(transport: str) -> None:
    async with nixl_fronts(transport) as (sender, receiver):
        transfers = [receiving(receiver, 20) for _ in range(64)]
        await asyncio.gather(*(each.run(sender.endpoint) for each in transfers))
        assert all(each.complete for each in transfers)
        assert {each.carrier for each in transfers} == {"nixl"}
        row = {row.carrier: row for row in receiver.receiver.links.rows()}["nixl"]
        assert row.transfers >= 65 and row.failures == 0


async def test_slots_that_changed_and_wrong_checksums_are_refused() -> None:
    async with nixl_fronts() as (sender, receiver):
        for fault in ("refill", "checksum"):
            setattr(sender.engine.faults, fault, True)
            transfer = receiving(receiver)
            with pytest.raises(TransferFailed, match="does not match its checksum") as raised:
                await transfer.run(sender.endpoint)
            assert not isinstance(raised.value, CarrierFailed)
            assert not transfer.complete
            setattr(sender.engine.faults, fault, False)
        await (again := receiving(receiver)).run(sender.endpoint)
        assert again.complete and again.carrier == "nixl"


@pytest.mark.parametrize(
    ("side", "number"), [("reading", signal.SIGKILL), ("serving", signal.SIGSTOP)]
)
async def test_lost_mover_fails_its_transfer_at_most(side: str, number: signal.Signals) -> None:
    async with nixl_fronts() as (sender, receiver):
        mover = reading_mover(receiver) if side == "reading" else serving_mover(sender)
        os.kill(pid(mover), number)
        began = time.monotonic()
        transfer = receiving(receiver)
        # A worker that has noticed by then that its mover is gone uses grpc, or another mover.
        with contextlib.suppress(TransferFailed):
            await transfer.run(sender.endpoint, frame_s=4.0)
            assert transfer.complete
        assert time.monotonic() - began < 6.0
        await (again := receiving(receiver)).run(sender.endpoint)
        assert again.complete


async def test_engines_that_are_replaced_get_movers_of_their_own() -> None:
    async with nixl_fronts() as (sender, receiver):
        old = serving_mover(sender), reading_mover(receiver)
        sender.replace_engine()
        receiver.replace_engine()
        await carry_by_nixl(sender, receiver)
        assert not any(mover.alive for mover in old)


async def test_transfer_that_ends_while_a_mover_stands_still_kills_it() -> None:
    async with nixl_fronts() as (sender, receiver):
        mover = reading_mover(receiver)
        os.kill(pid(mover), signal.SIGSTOP)
        transfer = asyncio.create_task(receiving(receiver).run(sender.endpoint))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        transfer.cancel()
        await asyncio.wait([transfer])
        assert time.monotonic() - began < 3.0
        assert not mover.alive


async def test_nixl_is_offered_and_accepted_only_where_it_is_trusted_and_of_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = FakeSession()
    monkeypatch.setattr("kvtransfer.nixl.package.RDMA_DEVICES", tmp_path)
    monkeypatch.delenv("UCX_TLS", raising=False)
    without_rdma = nixl_carrier()
    (tmp_path / "mlx5_0").mkdir()
    carriers = {
        "ready": nixl_carrier(),
        "no device": without_rdma,
        "not trusted": NixlCarrier(package(), trusted=False, command=command()),
        "not installed": NixlCarrier(None, trusted=True, command=command()),
        "other": NixlCarrier(
            NixlPackage(package().module, "0.0.1"), trusted=True, command=command()
        ),
    }
    for carrier in carriers.values():
        await carrier.start("127.0.0.1")
    offers = {name: carrier.offer("127.0.0.1:1") for name, carrier in carriers.items()}
    version = package().version
    assert [offers.pop(name) for name in ("ready", "other")] == [version, "0.0.1"]
    assert set(offers.values()) == {None}
    good = pb.CarrierOffer(name="nixl", address=version)
    for name in ("no device", "not trusted", "not installed", "other"):
        assert carriers[name].accept(good, session.engine) is None
    wrong = pb.CarrierOffer(name="nixl", address="0.0.1")
    assert carriers["ready"].accept(wrong, session.engine) is None
    assert not mover_processes(), "no mover is started for what is not accepted"
    for carrier in carriers.values():
        await carrier.close()
    session.end()


def test_the_front_does_not_import_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def refuse(name: str, package: str | None = None) -> None:
        raise AssertionError(f"{name} is imported")

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert find_nixl() == package()

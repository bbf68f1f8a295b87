"""The movers of other workers that this worker's reading mover is connected to.

acquire --AddPeer--> adding --PeerAdded--> known: in use, or idle --ForgetPeer--> gone
                       +------PeerFailed--> gone
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.nixl.messages import AddPeer, ForgetPeer, MoverAddress, MoverCommand
from protocol.errors import CarrierFailed, TransferFailed

MAX_IDLE_PEERS = 64
"""Connections that are kept without a transfer, for the next one from the same worker."""


@dataclass
class _Peer:
    number: int
    added: asyncio.Future[int]
    users: int = 0


class PeerTable:
    """The peers of one mover. ``MoverProcess`` owns it. Event loop only."""

    def __init__(self, send: Callable[[MoverCommand], None]) -> None:
        self._send = send
        self._peers: dict[bytes, _Peer] = {}  # by token, the least recently used first
        self._numbers = 0

    async def acquire(self, address: MoverAddress) -> int:
        """Return the number of a peer, connecting to it if it is new; the caller releases it.

        Raises CarrierFailed if it cannot be reached, and TransferFailed if this mover is lost."""
        peer = self._peers.get(address.token)
        if peer is None:
            self._numbers += 1
            peer = self._peers[address.token] = _Peer(
                self._numbers, asyncio.get_running_loop().create_future()
            )
            self._send(AddPeer(peer.number, address.token, address.metadata, address.probe))
        peer.users += 1
        try:
            return await asyncio.shield(peer.added)
        except BaseException:
            peer.users -= 1
            raise

    def release(self, address: MoverAddress) -> None:
        """Note that a transfer has ended: nothing of it is being read."""
        peer = self._peers.pop(address.token, None)
        if peer is None:
            return  # the mover was lost in the meantime
        peer.users -= 1
        self._peers[address.token] = peer
        self._forget_idle()

    def _forget_idle(self) -> None:
        idle = [token for token, peer in self._peers.items() if _is_idle(peer)]
        for token in idle[: max(0, len(idle) - MAX_IDLE_PEERS)]:
            self._send(ForgetPeer(self._peers.pop(token).number))

    # ---- what the mover says ----------------------------------------------------------------

    def on_added(self, number: int) -> None:
        for peer in self._peers.values():
            if peer.number == number and not peer.added.done():
                peer.added.set_result(number)

    def on_failed(self, number: int, why: str) -> None:
        for token, peer in list(self._peers.items()):
            if peer.number == number:
                del self._peers[token]
                _fail(peer, CarrierFailed(f"NIXL cannot reach the other worker: {why}"))

    def on_lost(self, error: TransferFailed) -> None:
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            _fail(peer, error)


def _is_idle(peer: _Peer) -> bool:
    return peer.users == 0 and peer.added.done()


def _fail(peer: _Peer, error: TransferFailed) -> None:
    if not peer.added.done():
        peer.added.set_exception(error)
        peer.added.exception()  # nobody may be waiting any more

"""What the KV transfers into one worker share. ``Worker`` creates the one ``KVReceiver``; the
Decode and the Prefill service ask it for the context of the engine session that serves now."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_cache.kv_format import Codec
from engine.process.client import EngineClient
from engine.process.session import EngineSession
from kvtransfer.codec_choice import CodecChoice, choose_codec
from kvtransfer.credits import InboundSlots
from kvtransfer.prefill_channels import PrefillChannels
from kvtransfer.receiver import KVClient
from kvtransfer.transfer_metrics import TrafficCounter


@dataclass(frozen=True)
class ReceiverContext:
    """What all transfers into one engine session share."""

    session: EngineSession
    slots: InboundSlots
    client: KVClient
    channels: PrefillChannels
    codec: Codec
    traffic: TrafficCounter


class KVReceiver:
    """The receiving end of a worker, which outlives its engine processes. Event loop only."""

    def __init__(
        self,
        engine: EngineClient,
        client: KVClient,
        channels: PrefillChannels,
        codec: CodecChoice,
    ) -> None:
        self._engine = engine
        self._client = client
        self._channels = channels
        self._codec = codec
        self.traffic = TrafficCounter()
        self._slots: tuple[EngineSession, InboundSlots] | None = None

    def context(self) -> ReceiverContext:
        """Return the context of the engine session that serves now; there must be one."""
        session = self._engine.current
        assert session is not None and session.ready is not None
        if self._slots is None or self._slots[0] is not session:
            self._slots = (session, InboundSlots(session))
        codec = choose_codec(session.ready.kv, self._codec)
        return ReceiverContext(
            session, self._slots[1], self._client, self._channels, codec, self.traffic
        )

    async def close(self) -> None:
        await self._channels.close()

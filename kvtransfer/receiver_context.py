"""What a worker needs to receive KV: shared by everybody who receives on it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_cache.kv_format import Codec
from engine.process.client import EngineClient
from engine.process.session import Session
from kvtransfer.codec_choice import TrafficCounter, Wanted, choose
from kvtransfer.prefill_channels import Prefillers
from kvtransfer.receiver import InboundSlots, KVSink


@dataclass(frozen=True)
class Links:
    """What transfers into one engine session share."""

    session: Session
    slots: InboundSlots
    sink: KVSink
    prefillers: Prefillers
    codec: Codec
    traffic: TrafficCounter


class Receiver:
    """The receiving end of a worker, whichever engine process serves it. Event loop only."""

    def __init__(
        self, engine: EngineClient, sink: KVSink, prefillers: Prefillers, codec: Wanted
    ) -> None:
        self._engine = engine
        self._sink = sink
        self._prefillers = prefillers
        self._codec = codec
        self.traffic = TrafficCounter()
        self._slots: tuple[Session, InboundSlots] | None = None

    def links(self) -> Links:
        """For the engine session that serves now; there is one."""
        session = self._engine.current
        assert session is not None and session.ready is not None
        if self._slots is None or self._slots[0] is not session:
            self._slots = (session, InboundSlots(session))
        codec = choose(session.ready.kv, self._codec)
        return Links(session, self._slots[1], self._sink, self._prefillers, codec, self.traffic)

    async def close(self) -> None:
        await self._prefillers.close()

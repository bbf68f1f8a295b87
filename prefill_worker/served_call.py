"""One Prefill.Run call on the worker that computes: engine events in, messages and frames out.
``PrefillService`` creates it when the call is accepted, and closes it when the call ends.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from engine.process.session import EngineSession
from kvtransfer.carrier import Carrier, OutboundFrame, OutboundLink, PairMessageLink
from kvtransfer.frames import FrameHeader, pack_header
from protocol.errors import InvalidRequest, TransferFailed, Unavailable
from protocol.requests import Finish, Logprobs, logprobs_to_wire
from protocol.wire import wire_pb2 as pb

MAX_CREDITS = 1 << 20
"""Frames for which one message may grant credits. More would be no frames of any prompt."""

MAX_BLOCKS = 1 << 24
"""Blocks that one message may skip, more than any prompt has."""


class AgreedFrames(NamedTuple):
    """How the frames of one call travel: what was agreed with the caller."""

    carrier: Carrier
    offer: pb.CarrierOffer
    address: str  # where the caller finds the carrier's end here
    codec: Codec
    frame_bytes: int


class ServedCall:
    """One Prefill.Run call: the SequenceListener of its sequence. It turns engine events into
    messages of the call, and gives filled slots to the carrier."""

    def __init__(
        self, session: EngineSession, handle: int, frames: AgreedFrames, start: pb.PrefillStart
    ) -> None:
        self.session = session
        self.handle = handle
        self._start = start
        self._transfer = bytes.fromhex(start.transfer)
        self._codec = frames.codec
        self._prompt_logprobs: list[pb.Logprobs] = []  # until the first token
        self._frames = 0
        self._put_at: dict[int, float] = {}  # frames in slots: when the carrier got them
        self._released_at = 0.0  # the last one
        self._begun = False  # the engine has the work
        self._early_credits = 0  # granted before
        self._skip_blocks = 0  # that the caller has
        # None: the caller has ended its half of the call.
        self.messages: asyncio.Queue[pb.PrefillEvent | Exception | None] = asyncio.Queue()
        self._link: OutboundLink = frames.carrier.open(
            self._transfer, frames.offer, session, self.messages.put_nowait
        )

    @property
    def stalled_s(self) -> float:
        """Seconds for which the carrier has had frames, and has let go of none."""
        now = time.monotonic()
        oldest = min(list(self._put_at.values()), default=now)
        return now - max(oldest, self._released_at)

    def begin(self, work: m.Prefill | m.Export) -> None:
        """Give the work to the engine, which hears nothing of the call before: it keeps an offer
        until both of its sockets have ended it."""
        self._begun = True
        if isinstance(work, m.Prefill):
            self.session.send_prompt(work)
        else:
            self.session.send(work)
        if self._skip_blocks:
            self.session.send_slot(m.Skip(self.handle, self._skip_blocks))
        self._grant(self._early_credits)

    def close(self) -> None:
        """Free the pages, and the slots as soon as they are not read any more."""
        self.session.detach(self.handle)
        if self._begun:
            self.session.send_slot(m.EndOffer(self.handle))
            self.session.send(m.Drop(self.handle))
        self._link.close()

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.Started):
            started = pb.PrefillEvent.Started(cached_tokens=event.cached_tokens)
            self.messages.put_nowait(pb.PrefillEvent(started=started))
        elif isinstance(event, m.KVFrame):
            self._send_frame(event)
        elif isinstance(event, m.Expired):
            self.messages.put_nowait(TransferFailed("the deadline of the request has passed"))
        elif isinstance(event, m.RequestRefused):
            error = Unavailable(event.why) if event.busy else InvalidRequest(event.why, event.param)
            self.messages.put_nowait(error)
        elif isinstance(event, m.PromptLogprobs):
            self._prompt_logprobs = [logprobs_to_wire(report) for report in event.logprobs]
        elif isinstance(event, m.Computed):
            computed = pb.PrefillEvent.Computed(tokens=event.tokens)
            self.messages.put_nowait(pb.PrefillEvent(computed=computed))

    def mark(self, event: str) -> None:
        """Report a stage of the fetch that precedes the prefill."""
        fetching = pb.PrefillEvent.Fetching(done=event == "fetch_done")
        self.messages.put_nowait(pb.PrefillEvent(fetching=fetching))

    def _send_frame(self, frame: m.KVFrame) -> None:
        header = FrameHeader(
            *(self._transfer, frame.sequence, frame.piece, frame.nbytes),
            *(self._codec, frame.checksum),
        )

        def release() -> None:  # called by any thread
            self._put_at.pop(frame.sequence, None)
            self._released_at = time.monotonic()
            self.session.send_slot(m.SlotsFree([frame.slot]))

        self._put_at[frame.sequence] = time.monotonic()
        self._link.put(
            OutboundFrame(
                header=pack_header(header),
                payload=self.session.arena.slot(frame.slot, frame.nbytes),
                sequence=frame.sequence,
                slot=frame.slot,
                generation=frame.generation,
                last=frame.last,
                release=release,
            )
        )
        self._frames += 1
        if frame.last:
            sent = pb.PrefillEvent.Sent(frames=self._frames)
            self.messages.put_nowait(pb.PrefillEvent(sent=sent))

    def take(self, message: pb.PrefillCall) -> None:
        """Handle a message of the caller after its first. Raises TransferFailed."""
        if message.HasField("taken"):
            self._link.taken(message.taken.sequences)
        elif message.HasField("pair"):
            if not isinstance(self._link, PairMessageLink):
                raise TransferFailed("a message about pairs, which this carrier has not")
            self._link.on_pair_message(message.pair)
        elif message.HasField("skip_blocks"):
            self._skip(message.skip_blocks)
        else:
            self._grant(min(message.credits, MAX_CREDITS))

    def _skip(self, blocks: int) -> None:
        if self._skip_blocks or blocks > MAX_BLOCKS:
            raise TransferFailed(f"skip_blocks must come once, and be at most {MAX_BLOCKS}")
        self._skip_blocks = blocks
        if self._begun:
            self.session.send_slot(m.Skip(self.handle, blocks))

    def _grant(self, frames: int) -> None:
        if not self._begun:
            self._early_credits = min(self._early_credits + frames, MAX_CREDITS)
        elif frames:
            self.session.send_slot(m.Grant(self.handle, frames))

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        first = pb.PrefillEvent.FirstToken(token=token, finish=int(finish))  # type: ignore[arg-type]
        if logprobs is not None:
            first.logprobs.CopyFrom(logprobs_to_wire(logprobs))
        first.prompt_logprobs.extend(self._prompt_logprobs)
        self.messages.put_nowait(pb.PrefillEvent(first_token=first))

    def on_lost(self) -> None:
        self.messages.put_nowait(ConnectionError("the engine died"))

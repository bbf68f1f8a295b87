"""The loop of the engine process: applies commands, runs steps, and reports events.

    loop:  receive commands -> run a step -> fill slots with KV to send -> send one batch of events

Frames are copied between slots and the pool by ``DirectCopies`` here at once, or on a GPU by
``engine.process.slot_copies`` beside the steps. The loop never waits for I/O while there is work.
It ends when the front closes the socket.

A sequence whose grammar is being compiled is held by ``PendingCommands``, without delay for others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Any

import torch

from engine.execution.engine import Engine
from engine.execution.stepper import TokenOut
from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed, EngineChannel
from engine.ipc.counters import SpeculationStatus
from engine.ipc.messages import KVFrame
from engine.ipc.shared_memory import Arena
from engine.kv_cache.kv_format import Codec, KVPiece, split_into_pieces
from engine.process.meter import StepMeter
from engine.process.pending_commands import PendingCommands
from engine.process.slot_copies import CopyProgress, SenderThread, SlotCopies, StreamedCopies
from engine.scheduling.sequence import blocks_for
from engine.structured_output.compiler import GrammarCompiler
from engine.structured_output.matcher import GrammarMatcher
from protocol.errors import InvalidRequest, TransferFailed, Unavailable

CopyToSlot = Callable[[int, KVPiece, int, Codec], int]
"""Copies (handle, piece, slot, codec) and returns the bytes."""


@dataclass
class _Transfer:
    pieces: deque[KVPiece]
    codec: Codec
    credits: int = 0  # frames that the receiver has granted
    sent: int = 0
    held: int = 0  # slots that the front has not emptied yet


class KVEgress:
    """Owns the outbound slots of one engine. A frame is sent when its blocks are computed, its
    receiver has granted it, and a slot is free. Transfers alternate, and none holds more than an
    equal share of the slots, so that a slow receiver does not delay others."""

    def __init__(self, slots: list[int], copy: CopyToSlot) -> None:
        self._free = list(slots)
        self._total = len(slots)
        self._copy = copy
        self._transfers: dict[int, _Transfer] = {}
        self._holder: dict[int, _Transfer] = {}  # by slot

    def open(self, handle: int, pieces: list[KVPiece], codec: Codec) -> None:
        self._transfers[handle] = _Transfer(deque(pieces), codec)

    def grant(self, handle: int, frames: int) -> None:
        """Allow ``frames`` more frames. Unknown handles belong to transfers that have ended."""
        if (transfer := self._transfers.get(handle)) is not None:
            transfer.credits += frames

    def close(self, handle: int) -> None:
        self._transfers.pop(handle, None)

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            self._holder.pop(slot).held -= 1
        self._free += slots

    def fill_slots(self, computed: Callable[[int], int]) -> list[KVFrame]:
        """Copy all frames that may be sent; ``computed(handle)`` returns the readable blocks."""
        frames: list[KVFrame] = []
        share = max(1, self._total // max(1, len(self._transfers)))
        turn = deque(self._transfers.items())
        while turn and self._free:
            handle, transfer = turn.popleft()
            if not transfer.pieces or not transfer.credits or transfer.held >= share:
                continue
            piece = transfer.pieces[0]
            if piece.block + piece.blocks > computed(handle):
                continue
            frames.append(self._send(handle, transfer))
            turn.append((handle, transfer))
        return frames

    def _send(self, handle: int, transfer: _Transfer) -> KVFrame:
        piece, slot = transfer.pieces.popleft(), self._free.pop()
        nbytes = self._copy(handle, piece, slot, transfer.codec)
        self._holder[slot] = transfer
        sequence = transfer.sent
        transfer.credits -= 1
        transfer.held += 1
        transfer.sent += 1
        return KVFrame(handle, sequence, slot, piece, nbytes, last=not transfer.pieces)


class DirectCopies:
    """Copies between slots and a pool in the same kind of memory, each at once."""

    asynchronous = busy = False

    def __init__(self, engine: Engine, slots: torch.Tensor) -> None:
        self._engine = engine
        self._slots = slots  # [slots, slot_bytes] uint8

    def ingest(self, command: m.Ingest) -> Sequence[m.Event]:
        data = self._slots[command.slot][: command.nbytes]
        try:
            self._engine.write(command.handle, command.piece, data, command.codec)
        except TransferFailed as error:
            return m.ReceiveFailed(command.handle, str(error)), m.SlotsFree([command.slot])
        return (m.SlotsFree([command.slot]),)

    def hold(self, _command: m.Command) -> bool:
        return False

    def poll(self) -> CopyProgress:
        return CopyProgress([], [])

    def fill_slot(self, handle: int, piece: KVPiece, slot: int, codec: Codec) -> int:
        return self._engine.read(handle, piece, self._slots[slot], codec)

    def offer(self, frames: list[KVFrame]) -> Sequence[m.Event]:
        return frames

    def close(self) -> None:
        pass


def make_copies(
    engine: Engine, arena: Arena, send: Callable[[Sequence[m.Event]], None]
) -> SlotCopies:
    """Return the copies between ``arena`` and the pool for the engine's device. ``send`` is called
    by threads."""
    slots = torch.frombuffer(arena.map, dtype=torch.uint8).view(-1, arena.shape.slot_bytes)
    device = engine.model.device
    if device.type == "cpu":
        return DirectCopies(engine, slots)
    from engine.process.cuda_copies import CudaCopyDevice

    copy_device = CudaCopyDevice(engine.pool, slots, arena.shape, device)
    senders = (SenderThread(send, name) for name in ("kv-fetched", "kv-gathered"))
    return StreamedCopies(engine, copy_device, *senders)


POLL_INTERVAL_S = 0.002
"""Interval at which an idle engine checks whether a grammar is ready."""

COPY_POLL_INTERVAL_S = 0.001
"""The same for frames on their way to the pool: the least that the socket's wait can resolve."""


def _has_grammar(command: m.Command) -> bool:
    if isinstance(command, m.Generate | m.Prefill | m.Receive):
        return bool(command.request.sampling.grammar)
    return False


def token_events(drawn: Sequence[TokenOut]) -> list[m.Event]:
    """Return the events for the tokens of one step. Log-probabilities of a prompt precede the first
    token of their sequence."""
    if not drawn:
        return []
    out: list[m.Event] = [
        m.PromptLogprobs(t.handle, t.prompt_logprobs) for t in drawn if t.prompt_logprobs
    ]
    handles, tokens, finishes, logprobs = zip(
        *((t.handle, t.token, t.finish, t.logprobs) for t in drawn), strict=True
    )
    asked = any(entry is not None for entry in logprobs)
    reports = list(logprobs) if asked else []
    out.append(m.TokensDrawn(list(handles), list(tokens), list(finishes), reports))
    return out


class EngineServer:
    """Serves one front over ``channel``. ``cluster.worker.engine_main`` creates it and calls
    ``run`` once."""

    def __init__(
        self,
        engine: Engine,
        grammars: GrammarCompiler,
        channel: EngineChannel[m.Command],
        arena: Arena,
        speculation: SpeculationStatus,
        take_role: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        copies: SlotCopies | None = None,
    ) -> None:
        self._engine = engine
        self._pending = PendingCommands(grammars)
        self._channel = channel
        self._clock = clock
        self._take_role = take_role
        self._copies = make_copies(engine, arena, channel.send) if copies is None else copies
        self._egress = KVEgress(arena.shape.outbound_slots(), self._copies.fill_slot)
        self._out: list[Any] = []
        self._meter = StepMeter(engine, clock, speculation)
        engine.manager.record_changes()

    def run(self) -> None:
        """Run until the front has closed the channel."""
        last_beat = self._clock()
        busy = False
        try:
            while True:
                for command in self._channel.receive(0.0 if busy else self._wait_s()):
                    if not self._hold_for_grammar(command):
                        self._take(command)
                self._apply_compiled()
                self._continue_copies()
                busy = self._step()
                if self._clock() - last_beat >= m.BEAT_S:
                    last_beat = self._clock()
                    self._out.append(self._meter.beat())
                self._flush()
        except ChannelClosed:
            self._copies.close()

    def _wait_s(self) -> float:
        """Return how long to wait for a command while there is nothing to compute."""
        if self._copies.busy:
            return COPY_POLL_INTERVAL_S
        return POLL_INTERVAL_S if self._pending.busy else m.BEAT_S

    # ---- commands ---------------------------------------------------------------------------

    def _hold_for_grammar(self, command: m.Command) -> bool:
        """Return whether the command has to wait for a grammar; it is held then."""
        if not self._pending.busy and not _has_grammar(command):
            return False
        return self._pending.hold(command)

    def _take_matcher(self, command: m.Generate | m.Prefill | m.Receive) -> GrammarMatcher | None:
        return self._pending.take_matcher(command.handle) if _has_grammar(command) else None

    def _take(self, command: m.Command) -> None:
        """Apply a command, unless its sequence has ended in the meantime."""
        if self._copies.hold(command):
            return
        handle = getattr(command, "handle", None)
        opens = isinstance(command, m.Generate | m.Prefill | m.Receive | m.Export | m.Import)
        if handle is None or opens or handle in self._engine.scheduler.sequences:
            try:
                self._apply(command)
            except InvalidRequest as error:
                assert handle is not None
                self._refuse(handle, error)
        elif isinstance(command, m.Ingest):
            self._out.append(m.SlotsFree([command.slot]))

    def _apply_compiled(self) -> None:
        """Apply the commands whose grammar has been compiled, or refuse their requests."""
        for ready in self._pending.take_released() if self._pending.busy else ():
            if ready.problem is not None:
                self._refuse(ready.handle, ready.problem)
                continue
            for command in ready.commands:
                self._take(command)

    def _continue_copies(self) -> None:
        """Apply the commands that waited for frames in the pool."""
        if self._copies.busy:
            progress = self._copies.poll()
            self._out += progress.events
            for command in progress.released:
                self._take(command)

    @singledispatchmethod
    def _apply(self, command: m.Command) -> None:
        raise AssertionError(command)

    @_apply.register
    def _generate(self, command: m.Generate) -> None:
        grammar = self._take_matcher(command)
        self._engine.generate(command.handle, command.request, grammar)

    @_apply.register
    def _prefill(self, command: m.Prefill) -> None:
        grammar = self._take_matcher(command)
        self._engine.prefill(command.handle, command.request, grammar)
        self._offer(command, blocks_for(len(command.request.context)))

    @_apply.register
    def _export(self, command: m.Export) -> None:
        self._offer(command, self._engine.export(command.handle, command.request))

    def _offer(self, command: m.Prefill | m.Export, blocks: int) -> None:
        """Send the KV of the blocks ``skip_blocks .. blocks`` as soon as it is computed."""
        size = self._engine.format.page_layer_bytes(command.codec)
        layers = self._engine.format.layers
        pieces = split_into_pieces(command.skip_blocks, blocks, layers, size, command.frame_bytes)
        self._egress.open(command.handle, pieces, command.codec)

    @_apply.register
    def _import(self, command: m.Import) -> None:
        cached, blocks = self._engine.import_(command.handle, command.request)
        self._out.append(m.ImportStarted(command.handle, cached, blocks))

    @_apply.register
    def _end_import(self, command: m.EndImport) -> None:
        self._engine.end_import(command.handle)

    @_apply.register
    def _receive(self, command: m.Receive) -> None:
        grammar = self._take_matcher(command)
        cached = self._engine.receive(command.handle, command.request, grammar)
        self._out.append(m.PrefixFound(command.handle, cached))

    @_apply.register
    def _reserve(self, command: m.Reserve) -> None:
        self._engine.reserve(command.handle)

    @_apply.register
    def _ingest(self, command: m.Ingest) -> None:
        self._out += self._copies.ingest(command)

    @_apply.register
    def _join(self, command: m.Join) -> None:
        self._engine.join(command.handle, command.token)

    @_apply.register
    def _grant(self, command: m.Grant) -> None:
        self._egress.grant(command.handle, command.frames)

    @_apply.register
    def _drop(self, command: m.Drop) -> None:
        self._egress.close(command.handle)
        self._engine.drop(command.handle)

    @_apply.register
    def _role(self, command: m.TakeRole) -> None:
        self._take_role(command.role)

    @_apply.register
    def _slots_free(self, command: m.SlotsFree) -> None:
        self._egress.free(command.slots)

    def _refuse(self, handle: int, error: InvalidRequest | Unavailable) -> None:
        self._egress.close(handle)
        if isinstance(error, Unavailable):
            self._out.append(m.RequestRefused(handle, str(error), "", busy=True))
        else:
            self._out.append(
                m.RequestRefused(handle, str(error), error.param or "", error.code or "")
            )

    # ---- one step ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Run one engine step and send the KV that is computed. Return whether it did anything."""
        scheduler = self._engine.scheduler
        plan = self._engine.plan()
        self._out += [m.Started(s.handle, s.cached) for s in scheduler.take_started()]
        self._out += [m.Reserved(s.handle) for s in scheduler.take_reserved()]
        self._out += [m.Joined(handle) for handle in scheduler.take_joined()]
        self._out += [
            m.ReceiveFailed(s.handle, "evicted meanwhile") for s in scheduler.take_evicted()
        ]
        self._out += [
            m.ImportEnded(handle, tokens) for handle, tokens in scheduler.take_ended_imports()
        ]
        # Frames granted during the last step do not have to wait for this step, too.
        granted = self._fill_slots()
        if plan:
            self._flush()  # peers can start transfers into new pages while this step computes
            drawn = self._meter.run(plan)
            self._out += token_events(drawn)
            for handle, problem in self._engine.take_refused():
                self._refuse(handle, problem)
        if changes := self._engine.manager.take_changes():
            self._out.append(m.CacheChanged(changes))
        # Tokens are sent before KV is copied, so that a first token does not wait for the copy.
        self._flush()
        frames = self._fill_slots()
        return bool(plan or granted or frames)

    def _fill_slots(self) -> bool:
        """Send the KV that is computed and granted. Return whether there was any."""
        frames = self._egress.fill_slots(self._engine.computed_blocks)
        if frames:
            if self._copies.asynchronous:
                self._flush()  # the front hears of a sequence before it hears of its frames
            self._out += self._copies.offer(frames)
        return bool(frames)

    def _flush(self) -> None:
        self._channel.send(self._out)
        self._out = []

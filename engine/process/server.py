"""The loop of the engine process: applies commands, runs steps, and reports events.

    loop:  receive commands -> run a step -> publish what it computed -> send one batch of events

KV frames are copied beside the loop by ``engine.slots.copy_thread``. The loop tells the thread
which blocks are computed and which pages may be written. It waits neither for I/O while there is
work, nor for the thread, except that a sequence whose pages are freed waits for the frame that is
being written into them. It ends when the front closes the socket.

A sequence whose grammar is being compiled is held by ``PendingCommands``, without delay for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import singledispatchmethod
from typing import Any

import torch

from engine.collectives.engine_pairs import EnginePairs
from engine.execution.engine import Engine
from engine.execution.stepper import TokenOut
from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed, EngineChannel
from engine.ipc.counters import SpeculationStatus
from engine.ipc.shared_memory import Arena
from engine.ipc.slot_channel import SlotReceiver
from engine.kv_cache.kv_format import KVPiece, split_into_pieces
from engine.kv_cache.kv_pool import KVPool
from engine.process.meter import StepMeter
from engine.process.pending_commands import PendingCommands
from engine.scheduling.sequence import Phase, blocks_for
from engine.scheduling.sequence import Sequence as EngineSequence
from engine.scheduling.step_policy import StepPlan
from engine.slots.copy_thread import CopyThread
from engine.slots.devices import CopyDevice, CpuCopies, arena_slots
from engine.slots.incoming import RejectedSequence
from engine.structured_output.compiler import GrammarCompiler
from engine.structured_output.matcher import GrammarMatcher
from protocol.errors import InvalidRequest, Unavailable

POLL_INTERVAL_S = 0.002
"""Interval at which an idle engine checks whether a grammar is ready."""


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


def make_copy_device(pool: KVPool, arena: Arena, device: torch.device) -> CopyDevice:
    """Return what copies frames between ``arena`` and ``pool``, which is on ``device``."""
    if device.type == "cpu":
        return CpuCopies(pool, torch.empty(1, arena.shape.slot_bytes, dtype=torch.uint8))
    from engine.slots.cuda_copies import CudaCopies  # imports Triton, of the GPU build

    return CudaCopies(pool, arena, device)


class EngineServer:
    """Serves one front over ``channel``. ``cluster.worker.engine_main`` creates it and calls
    ``run`` once."""

    def __init__(
        self,
        engine: Engine,
        grammars: GrammarCompiler,
        channel: EngineChannel[m.Command],
        arena: Arena,
        slot_channel: SlotReceiver,
        speculation: SpeculationStatus,
        take_role: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        device: CopyDevice | None = None,
    ) -> None:
        self._engine = engine
        self._pending = PendingCommands(grammars)
        self._channel = channel
        self._clock = clock
        self._take_role = take_role
        self._pairs = EnginePairs(arena_slots(arena), channel.send)
        self._copies = CopyThread(
            engine.format,
            device or make_copy_device(engine.pool, arena, engine.model.device),
            arena,
            slot_channel,
            channel.send,
            channel.wake,
            self._pairs.submit,
        )
        self._offers: set[int] = set()  # handles of prefills and exports that have not ended
        self._out: list[Any] = []
        self._meter = StepMeter(engine, clock, speculation)
        self._last_beat = clock()
        engine.manager.record_changes()

    def run(self) -> None:
        """Run until the front has closed the channel."""
        busy = False
        self._copies.start()
        try:
            while True:
                busy = self.turn(busy)
        except ChannelClosed:
            pass
        finally:
            self._copies.close()
            self._pairs.close()

    def turn(self, busy: bool) -> bool:
        """Take what the front has sent, run a step, and send what it has drawn. Without ``busy``,
        wait for a command first. Return whether there was anything to compute. Raise ChannelClosed
        when the front is gone. ``run`` calls it, and the simulator of faults, on its own clock."""
        for command in self._channel.receive(0.0 if busy else self._wait_s()):
            self._meter.prompts_taken += isinstance(command, m.Generate | m.Prefill)
            self._note_offer(command)
            if not self._hold_for_grammar(command):
                self._take(command)
        self._apply_compiled()
        self._apply_written()
        self._drop_expired()
        busy = self._step()
        if self._clock() - self._last_beat >= self._beat_s():
            self._beat()
        self._flush()
        return busy

    def _beat(self) -> None:
        self._last_beat = self._clock()
        self._out.append(self._meter.beat(self._copies.outbound_slots_held))

    def _beat_s(self) -> float:
        return m.LEAST_BEAT_S if self._meter.load_changed() else m.BEAT_S

    def _wait_s(self) -> float:
        """Return how long to wait for a command while there is nothing to compute."""
        return POLL_INTERVAL_S if self._pending.busy else self._beat_s()

    # ---- commands ---------------------------------------------------------------------------

    def _hold_for_grammar(self, command: m.Command) -> bool:
        """Return whether the command has to wait for a grammar; it is held then."""
        if not self._pending.busy and not _has_grammar(command):
            return False
        return self._pending.hold(command)

    def _take_matcher(self, command: m.Generate | m.Prefill | m.Receive) -> GrammarMatcher | None:
        return self._pending.take_matcher(command.handle) if _has_grammar(command) else None

    def _note_offer(self, command: m.Command) -> None:
        """Remember a handle whose KV the front may grant, until its end. Each gets one
        ``end_offer``, also while its grammar is compiled."""
        if isinstance(command, m.Prefill | m.Export):
            self._offers.add(command.handle)
        elif isinstance(command, m.Drop):
            self._end_offer(command.handle)

    def _end_offer(self, handle: int) -> None:
        if handle in self._offers:
            self._offers.remove(handle)
            self._copies.end_offer(handle)

    def _take(self, command: m.Command) -> None:
        """Apply a command, unless its sequence has ended in the meantime, or when its frames are
        written."""
        handle = getattr(command, "handle", None)
        opens = isinstance(command, m.Generate | m.Prefill | m.Receive | m.Export | m.Import)
        if handle is None or opens or handle in self._engine.scheduler.sequences:
            try:
                if not self._waits_for_frames(command):
                    self._apply(command)
            except InvalidRequest as error:
                assert handle is not None
                self._refuse(handle, error)

    def _waits_for_frames(self, command: m.Command) -> bool:
        """Return whether frames of the sequence are still to be written. The copy thread returns
        the command then."""
        if not isinstance(command, m.Join | m.EndImport):
            return False
        lease = self._engine.scheduler.sequences[command.handle].lease
        if lease is None or lease.frames >= command.frames:
            return False
        self._copies.wait_for_frames(command)
        return True

    def _apply_compiled(self) -> None:
        """Apply the commands whose grammar has been compiled, or refuse their requests."""
        for ready in self._pending.take_released() if self._pending.busy else ():
            if ready.problem is not None:
                self._refuse(ready.handle, ready.problem)
                continue
            for command in ready.commands:
                self._take(command)

    def _apply_written(self) -> None:
        """Apply the commands whose frames are written, and end sequences whose KV is invalid."""
        for item in self._copies.take_items():
            if isinstance(item, RejectedSequence):
                self._engine.reject_write(item.handle)
            else:
                self._take(item)

    def _drop_expired(self) -> None:
        """Drop the sequences whose deadline has passed, and tell the front."""
        for handle in self._engine.take_expired():
            self._end_offer(handle)  # first: its pages can be used again after the drop
            self._engine.drop(handle)
            self._out.append(m.Expired(handle))

    @singledispatchmethod
    def _apply(self, command: m.Command) -> None:
        raise AssertionError(command)

    @_apply.register
    def _generate(self, command: m.Generate) -> None:
        grammar = self._take_matcher(command)
        self._engine.generate(command.handle, command.request, grammar, command.expected_tokens)

    @_apply.register
    def _prefill(self, command: m.Prefill) -> None:
        grammar = self._take_matcher(command)
        self._engine.prefill(command.handle, command.request, grammar, command.expected_tokens)
        self._offer(command, blocks_for(len(command.request.context)))

    @_apply.register
    def _export(self, command: m.Export) -> None:
        self._offer(command, self._engine.export(command.handle, command.request))

    def _offer(self, command: m.Prefill | m.Export, blocks: int) -> None:
        """Send the KV of the first ``blocks`` blocks, but for those that the receiver has, as soon
        as it is computed."""
        kv = self._engine.format
        size = kv.block_layer_bytes(command.codec)

        def split(first_block: int) -> list[KVPiece]:
            return split_into_pieces(first_block, blocks, kv.layers, size, command.frame_bytes)

        self._copies.offer(command.handle, split, command.codec)

    @_apply.register
    def _import(self, command: m.Import) -> None:
        cached, blocks = self._engine.import_(command.handle, command.request)
        self._expect(self._engine.scheduler.sequences[command.handle])
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
    def _join(self, command: m.Join) -> None:
        self._engine.join(command.handle, command.token)

    @_apply.register
    def _drop(self, command: m.Drop) -> None:
        self._engine.drop(command.handle)

    @_apply.register
    def _role(self, command: m.TakeRole) -> None:
        self._take_role(command.role)

    def _refuse(self, handle: int, error: InvalidRequest | Unavailable) -> None:
        self._end_offer(handle)
        if isinstance(error, Unavailable):
            self._out.append(m.RequestRefused(handle, str(error), "", busy=True))
        else:
            self._out.append(
                m.RequestRefused(handle, str(error), error.param or "", error.code or "")
            )

    # ---- one step ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Run one engine step, and publish the KV that it computed. Return whether there was
        anything to compute."""
        plan = self._engine.plan()
        opened = self._report_moves()
        if plan.chunks and self._meter.load_changed():
            self._beat()  # a step with prompts is long, and may be the only one that they take
        if plan or opened:
            self._flush()  # peers can start transfers into new pages while this step computes
        self._publish(opened)
        if plan:
            drawn = self._meter.run(plan)
            self._out += token_events(drawn)
            for handle, problem in self._engine.take_refused():
                self._refuse(handle, problem)
            self._out += self._progress(plan)
        if changes := self._engine.manager.take_changes():
            self._out.append(m.CacheChanged(changes))
        self._flush()  # the front hears of tokens before it hears of the last frames
        if plan:
            self._publish(sequence for sequence, _ in plan.chunks)
        return bool(plan)

    def _report_moves(self) -> list[EngineSequence]:
        """Report what has moved between the scheduler's queues. Return what was started."""
        scheduler = self._engine.scheduler
        started, reserved = scheduler.take_started(), scheduler.take_reserved()
        for sequence in reserved:
            self._expect(sequence)
        self._out += [m.Started(s.handle, s.cached) for s in started]
        self._out += [m.Reserved(s.handle) for s in reserved]
        self._out += [m.Joined(handle) for handle in scheduler.take_joined()]
        self._out += [
            m.ReceiveFailed(s.handle, "evicted meanwhile") for s in scheduler.take_evicted()
        ]
        self._out += [
            m.ImportEnded(handle, tokens) for handle, tokens in scheduler.take_ended_imports()
        ]
        return started

    def _expect(self, sequence: EngineSequence) -> None:
        """Let frames be written into the pages of a sequence, of which the front does not know
        yet."""
        assert sequence.lease is not None
        self._copies.expect(sequence.lease)

    def _progress(self, plan: StepPlan) -> list[m.Event]:
        """Return how far the held prefills of a step are that go on."""
        return [
            m.Computed(s.handle, s.computed)
            for s, _ in plan.chunks
            if s.handle in self._offers and s.phase is Phase.PREFILL
        ]

    def _publish(self, sequences: Iterable[EngineSequence]) -> None:
        """Let the computed blocks be sent. The front knows the sequences by now."""
        held = self._engine.scheduler.sequences
        offered = [s for s in sequences if s.handle in self._offers and s.handle in held]
        if offered:
            blocks = self._engine.computed_blocks
            self._copies.publish([(s.handle, s.pages, blocks(s.handle)) for s in offered])

    def _flush(self) -> None:
        self._channel.send(self._out)
        self._out = []

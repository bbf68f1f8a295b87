"""The engine process: take commands, run a step, report; nothing else.

    loop:  take what has arrived  ->  step  ->  fill slots with KV that may go  ->  one batch out

The loop never waits for I/O while there is work. It ends when the front does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import singledispatchmethod
from typing import Any

import torch

from engine.execution.engine import Engine
from engine.execution.kv_egress import Egress
from engine.execution.stepper import TokenOut
from engine.ipc import messages as m
from engine.ipc.channel import Closed, EngineChannel
from engine.ipc.counters import SpecFigures
from engine.ipc.shared_memory import Arena
from engine.kv_cache.kv_format import Codec, Piece, cut
from engine.process.meter import Meter
from engine.scheduling.sequence import blocks_for
from engine.structured_output.compiler import Compiler
from engine.structured_output.pending_commands import LOOK_S, Parking
from protocol.errors import InvalidRequest, TransferFailed, Unavailable

# MERGED engine.reports
# What an engine tells its front of a step.


def tokens_of(drawn: Sequence[TokenOut]) -> list[m.Event]:
    """Of the tokens of one step: log-probabilities of a prompt go before its first one."""
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
    out.append(m.Tokens(list(handles), list(tokens), list(finishes), reports))
    return out


class EngineServer:
    """Serves one front over ``channel``."""

    def __init__(
        self,
        engine: Engine,
        grammars: Compiler,
        channel: EngineChannel[m.Command],
        arena: Arena,
        speculation: SpecFigures,
        take_role: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._parking = Parking(grammars)
        self._channel = channel
        self._clock = clock
        self._take_role = take_role
        # [slots, slot_bytes] uint8 over the shared mapping
        self._slots = torch.frombuffer(arena.map, dtype=torch.uint8).view(
            -1, arena.shape.slot_bytes
        )
        self._egress = Egress(arena.shape.outbound_slots(), self._copy_out)
        self._out: list[Any] = []
        self._meter = Meter(engine, clock, speculation)
        engine.manager.report()

    def run(self) -> None:
        """Until the front is gone."""
        last_beat = self._clock()
        busy = False
        try:
            while True:
                wait_s = LOOK_S if self._parking.busy else m.BEAT_S
                for command in self._channel.receive(0.0 if busy else wait_s):
                    if not self._parking.keeps(command):
                        self._take(command)
                self._unpark()
                busy = self._step()
                if self._clock() - last_beat >= m.BEAT_S:
                    last_beat = self._clock()
                    self._out.append(self._meter.beat())
                self._flush()
        except Closed:
            return

    # ---- commands ---------------------------------------------------------------------------

    def _take(self, command: m.Command) -> None:
        """A command about a sequence that has ended meanwhile is passed over."""
        handle = getattr(command, "handle", None)
        opens = isinstance(command, m.Generate | m.Prefill | m.Receive | m.Export | m.Import)
        if handle is None or opens or handle in self._engine.scheduler.sequences:
            self._apply(command)
        elif isinstance(command, m.Ingest):
            self._out.append(m.SlotsFree([command.slot]))

    def _unpark(self) -> None:
        """Go on with those whose grammar is compiled."""
        for ready in self._parking.take() if self._parking.busy else ():
            if ready.problem is not None:
                self._refuse(ready.handle, ready.problem)
                continue
            for command in ready.commands:
                self._take(command)

    @singledispatchmethod
    def _apply(self, command: m.Command) -> None:
        raise AssertionError(command)

    @_apply.register
    def _generate(self, command: m.Generate) -> None:
        try:
            grammar = self._parking.matcher(command.handle)
            self._engine.generate(command.handle, command.request, grammar)
        except InvalidRequest as error:
            self._refuse(command.handle, error)

    @_apply.register
    def _prefill(self, command: m.Prefill) -> None:
        try:
            grammar = self._parking.matcher(command.handle)
            self._engine.prefill(command.handle, command.request, grammar)
        except InvalidRequest as error:
            return self._refuse(command.handle, error)
        self._offer(command, blocks_for(len(command.request.context)))
        return None

    @_apply.register
    def _export(self, command: m.Export) -> None:
        try:
            blocks = self._engine.export(command.handle, command.request)
        except InvalidRequest as error:
            return self._refuse(command.handle, error)
        self._offer(command, blocks)
        return None

    def _offer(self, command: m.Prefill | m.Export, blocks: int) -> None:
        """KV of the blocks from ``skip_blocks`` to ``blocks`` may go out when it is computed."""
        size = self._engine.format.page_layer_bytes(command.codec)
        layers = self._engine.format.layers
        pieces = cut(command.skip_blocks, blocks, layers, size, command.frame_bytes)
        self._egress.open(command.handle, pieces, command.codec)

    @_apply.register
    def _import(self, command: m.Import) -> None:
        try:
            cached, blocks = self._engine.import_(command.handle, command.request)
        except InvalidRequest as error:
            return self._refuse(command.handle, error)
        self._out.append(m.Importing(command.handle, cached, blocks))
        return None

    @_apply.register
    def _adopt(self, command: m.Adopt) -> None:
        self._engine.adopt(command.handle)

    @_apply.register
    def _receive(self, command: m.Receive) -> None:
        try:
            grammar = self._parking.matcher(command.handle)
            cached = self._engine.receive(command.handle, command.request, grammar)
        except InvalidRequest as error:
            return self._refuse(command.handle, error)
        self._out.append(m.Found(command.handle, cached))
        return None

    @_apply.register
    def _reserve(self, command: m.Reserve) -> None:
        self._engine.reserve(command.handle)

    @_apply.register
    def _ingest(self, command: m.Ingest) -> None:
        data = self._slots[command.slot][: command.nbytes]
        try:
            self._engine.write(command.handle, command.piece, data, command.codec)
        except TransferFailed as error:
            self._out.append(m.Broken(command.handle, str(error)))
        self._out.append(m.SlotsFree([command.slot]))

    @_apply.register
    def _join(self, command: m.Join) -> None:
        try:
            self._engine.join(command.handle, command.token)
        except InvalidRequest as error:
            self._refuse(command.handle, error)

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
            self._out.append(m.Refused(handle, str(error), "", busy=True))
        else:
            self._out.append(m.Refused(handle, str(error), error.param or "", error.code or ""))

    # ---- one turn ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """One engine step and the KV that it frees to go; whether anything was done."""
        scheduler = self._engine.scheduler
        plan = self._engine.plan()
        self._out += [m.Started(s.handle, s.cached) for s in scheduler.take_started()]
        self._out += [m.Reserved(s.handle) for s in scheduler.take_reserved()]
        self._out += [m.Joined(handle) for handle in scheduler.take_joined()]
        self._out += [m.Broken(s.handle, "evicted meanwhile") for s in scheduler.take_evicted()]
        self._out += [m.Adopted(handle, tokens) for handle, tokens in scheduler.take_adopted()]
        # Credits that came during the last step: their frames do not wait for this one as well.
        granted = self._egress.pump(self._engine.computed_blocks)
        self._out += granted
        if plan:
            self._flush()  # who waits for pages can open the way for KV while this step computes
            drawn = self._meter.run(plan)
            self._out += tokens_of(drawn)
            for handle, problem in self._engine.take_refused():
                self._refuse(handle, problem)
        if changes := self._engine.manager.take_changes():
            self._out.append(m.Cached(changes))
        # Tokens leave before KV is copied: a first token never waits for the payload behind it.
        self._flush()
        frames = self._egress.pump(self._engine.computed_blocks)
        self._out += frames
        return bool(plan or granted or frames)

    def _flush(self) -> None:
        self._channel.send(self._out)
        self._out = []

    def _copy_out(self, handle: int, piece: Piece, slot: int, codec: Codec) -> int:
        return self._engine.read(handle, piece, self._slots[slot], codec)

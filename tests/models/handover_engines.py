"""Steps of the engines: those of decode workers, and prefill workers as a whole.

Each function stands for the methods that its docstring names, and yields (label, state after).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.models.handover_states import (
    ASKED,
    BAD,
    COMPUTED,
    DOWN,
    DROPPING,
    LOST,
    REFUSED,
    STARTED,
    UP,
    Bounds,
    DecodeWorkerState,
    EngineSequence,
    HandoverState,
    Link,
)

Steps = Iterator[tuple[str, HandoverState]]


def engine_steps(bounds: Bounds, s: HandoverState, d: int) -> Steps:
    worker = s.workers[d]
    if not worker.front:
        yield f"D{d} is started again", s.with_worker(d, DecodeWorkerState(link=worker.link))
    elif worker.engine == DOWN:
        yield f"D{d} has a new engine", s.with_worker(d, worker._replace(engine=UP))
    if worker.commands:
        yield f"E{d} takes {worker.commands[0]}", s.with_worker(d, take_command(worker))
    if worker.ingests:
        yield f"E{d} writes {worker.ingests[0]}", s.with_worker(d, write_frame(bounds, worker))
    for i, sequence in enumerate(worker.sequences):
        if is_in_batch(bounds, sequence):
            after = decode_one(bounds, worker, i)
            yield f"E{d} draws token {sequence.length}", s.with_worker(d, after)


def find(worker: DecodeWorkerState, attempt: object, number: object) -> int:
    wanted = attempt, number
    return next((i for i, q in enumerate(worker.sequences) if q[:2] == wanted), -1)


def with_sequence(
    worker: DecodeWorkerState, i: int, sequence: EngineSequence | None
) -> DecodeWorkerState:
    after = () if sequence is None else (sequence,)
    sequences = (*worker.sequences[:i], *after, *worker.sequences[i + 1 :])
    return worker._replace(sequences=sequences)


def take_command(worker: DecodeWorkerState) -> DecodeWorkerState:
    """Engine.generate, .receive, .reserve, .join and .drop."""
    (kind, attempt, number, *rest), others = worker.commands[0], worker.commands[1:]
    worker = worker._replace(commands=others)
    i = find(worker, attempt, number)
    if kind in ("generate", "receive"):
        new = EngineSequence(attempt, number, rest[0], here=kind == "generate")  # type: ignore[arg-type]
        worker = worker._replace(sequences=(*worker.sequences, new))
        found = (("found", attempt, number),) if kind == "receive" else ()
        return worker._replace(events=worker.events + found)
    if i < 0:
        return worker
    if kind == "drop":
        return with_sequence(worker, i, None)
    sequence = worker.sequences[i]
    if kind == "reserve":
        worker = with_sequence(worker, i, sequence._replace(reserved=True))
        return worker._replace(events=(*worker.events, ("reserved", attempt, number)))
    frames = int(str(rest[0]))
    joined = sequence._replace(joined=frames, length=sequence.length + 1)  # with the first token
    return with_sequence(worker, i, joined)


def write_frame(bounds: Bounds, worker: DecodeWorkerState) -> DecodeWorkerState:
    """The copy thread: Ingest. A frame of a sequence that was dropped is not written."""
    (attempt, number, sound), others = worker.ingests[0], worker.ingests[1:]
    worker = worker._replace(ingests=others)
    i = find(worker, attempt, number)
    if i < 0:
        return worker
    sequence = worker.sequences[i]
    if sound or "checks_ignored" in bounds.mutations:
        sound = sequence.sound and bool(sound)
        return with_sequence(
            worker, i, sequence._replace(written=sequence.written + 1, sound=sound)
        )
    worker = with_sequence(worker, i, sequence._replace(refused=True))
    return worker._replace(events=(*worker.events, ("receive failed", attempt, number)))


def is_in_batch(bounds: Bounds, sequence: EngineSequence) -> bool:
    """Scheduler: a sequence that receives KV joins when the frames that Join names are written."""
    if sequence.here:
        return True
    if "join_ignores_frames" in bounds.mutations:
        return sequence.joined >= 0
    return 0 <= sequence.joined <= sequence.written and not sequence.refused


def decode_one(bounds: Bounds, worker: DecodeWorkerState, i: int) -> DecodeWorkerState:
    """Engine.run: a token is a function of the context and of its KV."""
    sequence = worker.sequences[i]
    has_kv = sequence.here or (sequence.written == bounds.frames and sequence.sound)
    finish = sequence.length + 1 >= bounds.tokens
    token = sequence.length if has_kv else BAD
    event = ("token", sequence.attempt, sequence.sequence, token, finish)
    after = None if finish else sequence._replace(length=sequence.length + 1)
    return with_sequence(worker, i, after)._replace(events=(*worker.events, event))


# ---- Prefill workers ----------------------------------------------------------------------------


def prefill_steps(bounds: Bounds, s: HandoverState) -> Steps:
    for p in (0, 1):
        prefill = s.prefills[p]
        if not prefill.alive:
            yield f"P{p} is started again", s.with_prefill(p, prefill._replace(alive=True))
    for i, call in enumerate(s.calls):
        p = call.prefill
        if call.served == ASKED:
            yield f"P{p} gets the call of D{call.worker}", accept(s, i)
        elif not call.open and call.served in (STARTED, COMPUTED):
            if "released_without_drop" not in bounds.mutations:
                freeing = s.with_call(i, call._replace(served=DROPPING))
                yield f"P{p} sees that D{call.worker} ended its call", freeing
        elif call.served == DROPPING:
            yield f"P{p} frees the pages", s.with_call(i, None)
        elif call.open and call.served in (STARTED, COMPUTED):
            yield from compute(bounds, s, i)


def accept(s: HandoverState, i: int) -> HandoverState:
    """PrefillService.Run: the call names the instance that it is meant for."""
    call = s.calls[i]
    prefill = s.prefills[call.prefill]
    if not prefill.alive or prefill.instance != call.instance:
        return s.with_call(i, call._replace(served=REFUSED))
    return s.with_call(i, call._replace(served=STARTED, events=(("started",),)))


def compute(bounds: Bounds, s: HandoverState, i: int) -> Steps:
    """ServedCall.on_token and ._send_frame: the last frame is computed with the first token."""
    call = s.calls[i]
    if call.served == STARTED:
        finish = call.length + 1 >= bounds.tokens
        first = ("first token", call.length, finish)
        computed = call._replace(served=COMPUTED, events=(*call.events, first))
        yield f"P{call.prefill} draws token {call.length}", s.with_call(i, computed)
    sendable = bounds.frames - (call.served == STARTED)
    if call.granted and call.sent < sendable:
        frames = tuple(sorted((*call.frames, True)))
        sent = s.with_call(i, call._replace(sent=call.sent + 1, frames=frames))
        yield f"P{call.prefill} sends frame {call.sent}", sent


# ---- What is left of a process that died --------------------------------------------------------


def kill_engine(s: HandoverState, d: int) -> HandoverState:
    """What was on its way to or from the engine is lost; what came before it is not."""
    worker = s.workers[d]
    return s.with_worker(
        d, worker._replace(engine="dead", sequences=(), commands=(), ingests=(), events=())
    )


def kill_decode_front(s: HandoverState, d: int) -> HandoverState:
    """The engine dies with its front. Prefill workers see the ends of their calls."""
    attached = s.workers[d].link.attached
    link = Link(attached=attached, broken=attached)
    s = s.with_worker(d, DecodeWorkerState(front=False, engine=DOWN, link=link))
    for i in reversed(range(len(s.calls))):
        call = s.calls[i]
        if call.worker == d and call.open:
            held = call.served in (STARTED, COMPUTED)
            after = call._replace(open=False, frames=(), events=()) if held else None
            s = s.with_call(i, after)
    return s


def kill_prefill(s: HandoverState, p: int, *, front: bool) -> HandoverState:
    """Kill the engine of a prefill worker, and with ``front`` the whole worker."""
    prefill = s.prefills[p]
    if front:
        s = s.with_prefill(p, prefill._replace(alive=False, instance=prefill.instance + 1))
    for i in reversed(range(len(s.calls))):
        call = s.calls[i]
        if call.prefill == p and call.served != REFUSED:
            lost = call._replace(served=LOST, frames=(), events=())
            s = s.with_call(i, lost if call.open else None)
    return s

"""Entry of the engine process: ``python -m MODULE SOCKET_FD ARENA_FD SLOT_SOCKET_FD``.

It reads ``EngineSettings`` as JSON from standard input and speaks ``engine/ipc/messages.py`` on the
sockets; so does any module that the key ``worker.engine`` names instead. It ends with its front.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from cluster.local.die_with_parent import die_with_parent
from cluster.local.timed_log import log_with_times
from engine.ipc import messages as m
from engine.ipc.channel import ChannelClosed, EngineChannel
from engine.ipc.settings import EngineSettings
from engine.ipc.shared_memory import Arena
from engine.ipc.slot_channel import SlotReceiver
from engine.scheduling import step_policy as decode_policy
from engine.scheduling import step_policy as prefill_policy
from engine.scheduling.step_policy import StepPolicy
from protocol.errors import BatonError, EngineDied
from protocol.garbage_collection import without_garbage_collection

POLICIES: dict[str, StepPolicy] = {
    "prefill": prefill_policy.plan_prefill_step,
    "decode": decode_policy.plan_decode_step,
}


def main() -> None:
    log_with_times()
    die_with_parent(os.getppid())  # a stuck engine would not notice that its socket is closed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front handles Ctrl-C
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineSettings)
    sock = socket.socket(fileno=int(sys.argv[1]))
    channel: EngineChannel[m.Command] = EngineChannel(sock, m.Command)
    arena = Arena(int(sys.argv[2]), settings.arena)
    arena.release_fd()
    slot_channel = SlotReceiver(socket.socket(fileno=int(sys.argv[3])))
    try:
        serve_engine(settings, channel, arena, slot_channel)
    except ChannelClosed:
        pass
    except BatonError as error:
        channel.send([m.EngineFailed(str(error))])


def serve_engine(
    settings: EngineSettings,
    channel: EngineChannel[m.Command],
    arena: Arena,
    slot_channel: SlotReceiver,
) -> None:
    """Load the model, announce it, and serve until the front closes the socket. Raise a BatonError
    for what the operator has to change, which ``main`` reports to the front."""

    def progress(what: str, fraction: float) -> None:
        channel.send([m.Progress(what, fraction)])

    engine_server = build_server(settings, channel, arena, slot_channel, progress)
    gc.collect()
    gc.freeze()  # loaded objects stay; the collector need not walk them in every step
    engine_server()


def build_server(
    settings: EngineSettings,
    channel: EngineChannel[m.Command],
    arena: Arena,
    slot_channel: SlotReceiver,
    progress: Callable[[str, float], None],
) -> Callable[[], None]:
    """Load the model and announce it. Return the loop to run."""
    progress("importing torch", 0.0)
    with without_garbage_collection():
        from engine.execution.loading import load_engine
        from engine.process.server import EngineServer

    loaded = load_engine(settings, POLICIES[settings.role], progress)
    engine = loaded.engine

    def take_role(role: str) -> None:
        # A prefill worker does not decode, so that proposers would only cost time there.
        engine.take_role(POLICIES[role], drafts=role == "decode")

    take_role(settings.role)  # a lent worker whose engine was restarted has another role
    speculation = loaded.speculation
    with loaded.memory.explained(lambda: "allocating memory for KV frames"):
        server = EngineServer(
            engine, loaded.grammars, channel, arena, slot_channel, speculation, take_role
        )
    channel.send([loaded.ready])  # on a GPU the server has compiled its kernels by now

    def run() -> None:
        with loaded.memory.explained(lambda: "running a step", EngineDied):
            server.run()

    return run


if __name__ == "__main__":
    main()

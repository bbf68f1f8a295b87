"""Entry of the engine process: ``python -m MODULE SOCKET_FD ARENA_FD``, the spec on
standard input. It dies with its front, whichever way the front goes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from cluster.local.die_with_parent import die_with_parent
from decode_worker import policy as decode_policy
from engine.ipc import messages as m
from engine.ipc.channel import Closed, EngineChannel
from engine.ipc.shared_memory import Arena
from engine.ipc.spec import EngineSpec
from engine.scheduling.step_policy import Policy
from prefill_worker import policy as prefill_policy
from protocol.errors import BatonError

POLICIES: dict[str, Policy] = {"prefill": prefill_policy.plan, "decode": decode_policy.plan}


def main() -> None:
    die_with_parent(os.getppid())  # a stuck engine would read no end of its socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's to handle
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineSpec)
    sock = socket.socket(fileno=int(sys.argv[1]))
    channel: EngineChannel[m.Command] = EngineChannel(sock, m.Command)
    arena = Arena(int(sys.argv[2]), spec.arena)
    arena.release_fd()
    try:
        serve(spec, channel, arena)
    except Closed:
        pass
    except BatonError as error:
        channel.send([m.Failed(str(error))])


def serve(spec: EngineSpec, channel: EngineChannel[m.Command], arena: Arena) -> None:
    """Load, say so, and serve until the front is gone."""

    def progress(what: str, fraction: float) -> None:
        channel.send([m.Progress(what, fraction)])

    engine_server = build(spec, channel, arena, progress)
    gc.collect()
    gc.freeze()  # what is loaded stays; the collector need not look at it in every step
    engine_server()


def build(
    spec: EngineSpec,
    channel: EngineChannel[m.Command],
    arena: Arena,
    progress: Callable[[str, float], None],
) -> Callable[[], None]:
    """Load the model and announce it; returns the loop to run."""
    progress("importing torch", 0.0)
    from engine.execution.loading import load
    from engine.process.server import EngineServer

    loaded = load(spec, POLICIES[spec.role], progress)
    channel.send([loaded.ready])
    engine = loaded.engine

    def take_role(role: str) -> None:
        # Nobody decodes on a prefill worker, where proposers would only cost: heads see each pass.
        engine.take_role(POLICIES[role], drafts=role == "decode")

    take_role(spec.role)  # that of a lent worker, too, whose engine was replaced
    speculation = loaded.speculation
    return EngineServer(engine, loaded.grammars, channel, arena, speculation, take_role).run


if __name__ == "__main__":
    main()

"""All checks, and which of them concern what is started."""

from __future__ import annotations

from typing import Any

from cluster.doctor import draft, gpus, listening, machine, memory, model, packages, redis, state
from cluster.doctor.run import Check
from cluster.doctor.wanted import Wanted

MODEL = Check("model", model.collect, model.judge)
MEMORY = Check("memory", memory.collect, memory.judge)
_DRAFT = Check("draft", draft.collect, draft.judge)
_PACKAGES = Check("packages", packages.collect, packages.judge)
_MACHINE = Check("machine", machine.collect, machine.judge)
_GPU = Check("gpu", gpus.collect, gpus.judge)
_PORT = Check("port", listening.collect, listening.judge)
_REDIS = Check("redis", redis.collect, redis.judge)
_LEFTOVERS = Check("leftovers", state.collect, state.judge)


def everything() -> list[Check[Any]]:
    """For `baton doctor`."""
    return [_PACKAGES, _MACHINE, _GPU, _PORT, _REDIS, _LEFTOVERS, MODEL, _DRAFT, MEMORY]


def before_start(wanted: Wanted) -> list[Check[Any]]:
    """What a start of this kind depends on."""
    if wanted.what == "router":
        return [_PACKAGES, _PORT, _REDIS, MODEL]
    return [_PACKAGES, _MACHINE, _GPU, _PORT, _REDIS, MODEL, _DRAFT, MEMORY]

"""Lines of progress.log as sentences, for `baton logs`."""

from __future__ import annotations

import re

import msgspec

from cluster.local.start_report import (
    ClusterReady,
    StageDone,
    StageFailed,
    StageNote,
    StageStarted,
    StartEvent,
)

_decoder = msgspec.json.Decoder(StartEvent)
_FRACTION = re.compile(r" \d+%$")


def progress_text(line: bytes) -> str | None:
    """Return the text of a line; None for one that repeats what another line has said: a fraction
    of a step, or what is still waited for."""
    try:
        event = _decoder.decode(line)
    except msgspec.DecodeError:
        return line.decode(errors="replace")
    match event:
        case StageStarted(stage):
            return f"{stage}: started"
        case StageNote(text):
            return None if _FRACTION.search(text) else text
        case StageDone(stage, text):
            return f"{stage}: done, {text}" if text else f"{stage}: done"
        case StageFailed(stage, reason):
            return f"{stage}: failed: {reason}"
        case ClusterReady(url=url, model_id=model):
            return f"ready: {model} at {url}"
        case _:  # StageWaiting
            return None

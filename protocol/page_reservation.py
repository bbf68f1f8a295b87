"""When a decode worker reserves pages for the KV of a prompt that another worker computes.

    P started --chunk--> computed --chunk--> computed --last chunk--> first token
                                        ^ D asks for its pages
                                        |<------- lead ------->|

Pages that are reserved at ``started`` stay empty while P computes, and other sequences lack them.
Pages that are reserved too late delay the first decode step. So D asks as late as possible, and so
early that the KV of all chunks but the last one can cross the link while P still computes. The
decode worker's hand-over and the simulator follow these functions.

No two transfers can block each other. A sequence asks for pages at D only when P has started its
prompt, which then has all of its pages at P; it gets all of its pages at D at once, and none while
it waits for them. A sequence that has pages at both waits for computation and the link only, and
both waits have deadlines. So every wait for pages ends without another one: at P by the end of
transfers, at D by the end of decoding, and the oldest request is served first at either.
"""

from __future__ import annotations

FEW_CHUNKS = 2
"""A prompt of so many chunks reserves at once: it is computed before its pace is known."""

TRUSTED_SHARE = 0.9
"""Share of the predicted time until the first token that is relied on. Later chunks attend to more
tokens and are rather slower than the ones before, so predictions err to the safe side already."""

MARGIN_S = 0.01
"""Allowance for messages and events between the two workers."""


def is_pace_known(elapsed_s: float) -> bool:
    """Return whether progress ``elapsed_s`` seconds after the start tells how fast a prompt is
    computed. On a busy machine a report may arrive together with the message of the start; then the
    next one decides, or at the latest the first token."""
    return elapsed_s >= MARGIN_S


def reserves_at_start(tokens: int, chunk: int) -> bool:
    """Return whether a prompt with ``tokens`` to compute, in steps of at most ``chunk`` (0:
    unknown), reserves when its prefill starts instead of waiting for the first progress."""
    return chunk <= 0 or tokens <= FEW_CHUNKS * chunk


def reservation_delay_s(
    *,
    tokens: int,
    computed: int,
    elapsed_s: float,
    kv_bytes: float,
    link_bytes_s: float | None,
    reserve_s: float,
) -> float:
    """Return for how many seconds from now the reservation can wait; 0 means: reserve now.

    P has computed ``computed`` of the prompt's ``tokens`` in the ``elapsed_s`` seconds since it
    started, which predicts when the first token is due. ``kv_bytes`` have to cross the link at
    ``link_bytes_s`` (None: not known), after a reservation that takes ``reserve_s``."""
    if computed <= 0 or link_bytes_s is None or link_bytes_s <= 0:
        return 0.0
    left_s = elapsed_s * max(0, tokens - computed) / computed
    lead_s = kv_bytes / link_bytes_s + reserve_s + MARGIN_S
    return max(0.0, TRUSTED_SHARE * left_s - lead_s)

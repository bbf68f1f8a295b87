"""Whether a sequence ends with the token just drawn: a pure function. Torch-free."""

from __future__ import annotations

from collections.abc import Set

from engine.sequence import Sequence
from protocol.request import Finish


def finish_reason(sequence: Sequence, token: int, eos: Set[int]) -> Finish:
    """``token`` is the last of ``sequence``, whose grammar has taken it; ``eos`` end a text.

    A grammar allows an end token only where the text may end, and nothing after it: so it ends the
    text under ``ignore_eos``, too. Where the model has none, a grammar that is through does.
    """
    grammar = sequence.grammar
    if token in eos and (grammar is not None or not sequence.request.sampling.ignore_eos):
        return Finish.STOP
    if token in sequence.stop_tokens:
        return Finish.STOP
    if grammar is not None and not eos and grammar.stopped:
        return Finish.STOP
    if len(sequence.tokens) >= sequence.request.length_limit:
        return Finish.LENGTH
    return Finish.NONE

"""Log-probabilities that travel beside a drawn token."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol import wire_pb2 as pb
from protocol.errors import InvalidRequest
from protocol.sampling import MAX_LOGPROBS


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of the model's own probabilities, before temperature, filters, penalties
    and bias.

    ``rank`` of the drawn token: 1 is the most likely; equal ones share a rank. ``top_tokens`` are
    the most likely tokens, best first, as many as were asked for; ``top_logprobs`` is theirs.
    """

    logprob: float
    rank: int
    top_tokens: list[int]
    top_logprobs: list[float]


def logprobs_to_wire(value: Logprobs) -> pb.Logprobs:
    return pb.Logprobs(
        logprob=value.logprob,
        rank=value.rank,
        top_tokens=value.top_tokens,
        top_logprobs=value.top_logprobs,
    )


def all_from_wire(values: Iterable[pb.Logprobs], count: int) -> list[Logprobs]:
    """Those of ``count`` tokens. Raises InvalidRequest where as many did not come."""
    read = [logprobs_from_wire(value) for value in values]
    if len(read) != count:
        raise InvalidRequest(
            f"log-probabilities of {count} tokens were due, of {len(read)} came", "logprobs"
        )
    return read


def logprobs_from_wire(value: pb.Logprobs) -> Logprobs:
    """Raises InvalidRequest for what no worker may say: the peer is not trusted."""
    count = len(value.top_tokens)
    if count > MAX_LOGPROBS or count != len(value.top_logprobs):
        raise InvalidRequest(
            f"as many top_logprobs as top_tokens, at most {MAX_LOGPROBS}, were expected;"
            f" {len(value.top_logprobs)} and {count} came",
            "logprobs",
        )
    return Logprobs(value.logprob, value.rank, list(value.top_tokens), list(value.top_logprobs))

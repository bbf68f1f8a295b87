"""Where a prompt is computed: a pure decision."""

from __future__ import annotations


def prefill_here(
    context: int, cached: int, prefill_worker: bool, local_prefill_tokens: int
) -> bool:
    """Whether the decode worker computes the ``context - cached`` missing tokens itself.

    It does when nobody else can, and when they are so few that the way to a prefill worker and back
    takes longer than they do.
    """
    return not prefill_worker or context - cached <= local_prefill_tokens

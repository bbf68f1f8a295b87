"""Numbers of workers within limits and a budget of GPUs. Pure."""

from __future__ import annotations

from cluster.sizing.snapshot import Counts, Limits


def fit(wanted: Counts, limits: Limits, gpus: float = 1.0) -> Counts:
    """``wanted`` within the limits of each role. Where the budget does not pay for both (``gpus``:
    of a worker), the pair that maximises min(P/P*, D/D*): the role that is served worst is served
    as well as can be. The least numbers hold in any case."""
    least, most = limits.least, limits.most
    prefill = max(least.prefill, min(wanted.prefill, most.prefill))
    decode = max(least.decode, min(wanted.decode, most.decode))
    if limits.gpus is None or (prefill + decode) * gpus <= limits.gpus:
        return Counts(prefill=prefill, decode=decode)
    room = int(limits.gpus / gpus)

    def served(p: int) -> tuple[float, float]:
        d = min(decode, room - p)
        shares = (p / max(1, prefill), d / max(1, decode))
        return min(shares), max(shares)

    fewest, largest = least.prefill, max(least.prefill, min(prefill, room - least.decode))
    best = max(range(fewest, largest + 1), key=served)
    return Counts(prefill=best, decode=max(least.decode, min(decode, room - best)))

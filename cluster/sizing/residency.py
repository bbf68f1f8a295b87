"""Sequences on decode workers: the KV that they hold, and the batches that objectives allow. Pure.

By Little's law a worker that emits r tokens/s decodes b = r*TPOT(b) sequences. Each holds its KV
for longer than it decodes: pages are reserved while its prompt is computed elsewhere and while KV
is on the wire (protocol/page_reservation.py). So a batch b takes

    b*(E[kv] + E[tokens*(seconds held before decoding)]/(E[output]*TPOT(b)))   tokens of the pool

Routers place each sequence where most is free, which does not keep the workers of a pool equal. The
KV of a worker grows with each step, and falls only when a sequence ends. One that has more than the
others gets no sequences until then: its excess grows evenly, and falls by whole sequences now and
then. If their lengths are exponential with mean m, the excess is exponential, too: by balance of
the flows across each level, its mean and its standard deviation are

    m*g/(1 - g),   g = E[output]/E[prompt + output], what of a sequence has grown on the worker
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from cluster.sizing.queueing import CHANCE_DEVIATIONS, SampleVector, prefill_service
from cluster.sizing.snapshot import (
    NO_CORRECTIONS,
    Corrections,
    MachineModel,
    RequestMix,
    RequestSample,
    SloTargets,
)
from protocol.page_reservation import MARGIN_S, TRUSTED_SHARE, reserves_at_start
from protocol.performance.speculation_profile import decode_pace
from protocol.performance.step_model import StepModel

TPOT_MARGIN = 1.1
"""An objective below this many times the TPOT of a single sequence is out of reach: the model is
not more exact than that."""
IMBALANCE_DEVIATIONS = 4.0
"""Standard deviations of the KV of a worker, which is exponential, above the mean: less than 1% of
the time, a worker has more. Then it preempts a sequence, whose KV is computed again."""
BISECTIONS = 20
"""A mean batch is found to a millionth of the largest."""


class ResidentSequences(NamedTuple):
    """Sequences while they decode on one kind of worker; zeros where no request is known."""

    machine: MachineModel
    output: float  # mean output tokens of a request
    kv_tokens: float  # mean KV tokens, weighted by how long a sequence decodes
    spread: float  # of the KV tokens: variance over the mean squared
    early: float  # token-seconds of KV that a request holds before it decodes
    imbalance: float  # standard deviation of the KV tokens between the workers of a pool
    correction: float  # observed over predicted TPOT

    def tpot_s(self, batch: float) -> float:
        """Return the mean time between two tokens of a sequence in such a batch."""
        kv = batch * self.kv_tokens
        pace = decode_pace(StepModel(*self.machine.step), self.machine.speculation, batch, kv)
        return pace.tpot_s * self.correction

    def held_tokens(self, batch: float) -> float:
        """Return the KV tokens that each sequence of the batch takes of the pool, with its share of
        those that do not decode yet."""
        lasts_s = self.output * self.tpot_s(batch)
        return self.kv_tokens + (self.early / lasts_s if lasts_s > 0 else 0.0)

    def mean_batch(self, tokens_s: float, most: float) -> float:
        """Return the batch of a worker that emits ``tokens_s``, by Little's law; ``most`` where
        this takes more sequences."""
        return largest_batch(lambda batch: batch < tokens_s * self.tpot_s(batch), 0.0, most)


def largest_batch(fits: Callable[[float], bool], low: float, most: float) -> float:
    """Return the largest batch from ``low`` to ``most`` that ``fits``, by bisection. Mean batches
    are no whole numbers."""
    if fits(most):
        return most
    for _ in range(BISECTIONS):
        middle = (low + most) / 2
        low, most = (middle, most) if fits(middle) else (low, middle)
    return low


def resident_sequences(
    mix: RequestMix, machine: MachineModel, corrections: Corrections = NO_CORRECTIONS,
    prefill: MachineModel | None = None,
) -> ResidentSequences:  # fmt: skip
    """Return the sequences of the mix on ``machine``. ``prefill``: the machine that computes their
    prompts, None: none does."""
    if sum(s.weight for s in mix.samples) <= 0:
        return ResidentSequences(machine, 0.0, 0.0, 0.0, 0.0, 0.0, corrections.decode)
    rows = [(s.uncached + s.cached, s.output, s.weight) for s in mix.samples]
    prompts, outputs, weights = np.array(rows, dtype=np.float64).T
    stays, held = weights * np.maximum(1.0, outputs), prompts + outputs / 2
    kv_tokens = np.average(held, weights=stays)
    variance = np.average((held - kv_tokens) ** 2, weights=stays)
    early = 0.0
    if prefill is not None:
        times = prefill_service(mix, prefill, corrections.prefill).seconds.tolist()
        seconds = map(partial(early_seconds, prefill, machine), mix.samples, times)
        early = float(np.average(prompts * list(seconds), weights=weights))
    return ResidentSequences(
        machine=machine,
        output=float(np.average(outputs, weights=weights)),
        kv_tokens=float(kv_tokens) * corrections.kv,
        spread=float(variance / kv_tokens**2) if kv_tokens > 0 else 0.0,
        early=early * corrections.kv,
        imbalance=_imbalance(prompts, outputs, weights) * corrections.kv,
        correction=corrections.decode,
    )


def _imbalance(prompts: SampleVector, outputs: SampleVector, weights: SampleVector) -> float:
    """Return the standard deviation of the KV tokens between workers; infinite without prompts."""
    whole = np.average(prompts + outputs, weights=weights)
    if whole <= 0:
        return 0.0
    # The mean of an exponential variable with the same mean residual.
    mean = np.average((prompts + outputs) ** 2, weights=weights) / (2.0 * whole)
    grown = np.average(outputs, weights=weights) / whole
    return float(mean * grown / (1.0 - grown)) if grown < 1.0 else math.inf


def early_seconds(
    prefill: MachineModel, decode: MachineModel, sample: RequestSample, prompt_s: float
) -> float:
    """Return for how long a decode worker holds the pages of a prompt before its sequence decodes,
    on an idle link: since the start of a short prompt, since KV had to flow for a longer one, and
    until the KV of its last chunk has arrived. ``prompt_s``: seconds of its computation."""
    links = [m.link_bytes_s for m in (prefill, decode) if m.link_bytes_s > 0]
    token_s = decode.kv_bytes / min(links) if links else 0.0
    wire_s = min(sample.uncached, prefill.chunk) * token_s
    if reserves_at_start(round(sample.uncached), prefill.chunk):
        return prompt_s + wire_s
    first_chunk_s = prompt_s * prefill.chunk / sample.uncached
    if not links:
        return prompt_s - first_chunk_s
    step_s = StepModel(*decode.step).step
    lead_s = (sample.uncached + sample.cached) * token_s + step_s + MARGIN_S
    return min(prompt_s - first_chunk_s, lead_s / TRUSTED_SHARE) + wire_s


class DecodeBatchLimits(NamedTuple):
    """The most sequences that a worker decodes together, by each limit and by its largest batch; at
    least one."""

    by_tpot: float
    by_kv: float
    infeasible: bool  # the TPOT objective is out of reach
    excess: float  # sequences less, where KV has room for what a worker has more than the others

    @property
    def size(self) -> float:
        """b*; throughput grows with the batch, so that the largest is the best."""
        return min(self.by_tpot, self.by_kv)

    def excess_beside(self, workers: int) -> float:
        """Return ``excess`` over the mean of so many workers, of which this one is a part: one
        alone has no more than the others."""
        return self.excess * math.sqrt(1.0 - 1.0 / workers)


def decode_batch_limits(resident: ResidentSequences, goals: SloTargets) -> DecodeBatchLimits:
    most, pool = float(resident.machine.max_batch), resident.machine.kv_tokens
    # A sequence takes its pages from one worker. What is left where the next does not fit is on
    # average E[kv^2]/(2*E[kv]), as of any renewal process.
    unused = resident.kv_tokens * (1.0 + resident.spread) / 2.0

    def excess(batch: float) -> float:  # no more than of sequences that are spread by chance
        by_chance = resident.kv_tokens * math.sqrt(batch * (1.0 + resident.spread))
        return min(IMBALANCE_DEVIATIONS * resident.imbalance, CHANCE_DEVIATIONS * by_chance)

    def by_kv(more: Callable[[float], float]) -> float:
        def fits(batch: float) -> bool:
            tokens = batch * resident.held_tokens(batch) + unused + more(batch)
            return not pool or tokens <= pool

        return largest_batch(fits, 1.0, most)

    least_s = TPOT_MARGIN * resident.tpot_s(1.0)
    reachable = goals.tpot_s >= least_s
    # An objective that is out of reach counts the less, the further away it is: no pool grows for
    # what it cannot attain, and none jumps.
    tpot_s = goals.tpot_s if reachable else least_s * (least_s / goals.tpot_s) ** 2
    limits = DecodeBatchLimits(
        by_tpot=largest_batch(lambda b: resident.tpot_s(b) <= tpot_s, 1.0, most),
        by_kv=by_kv(lambda batch: 0.0),
        infeasible=not reachable,
        excess=0.0,
    )
    return limits._replace(excess=max(0.0, limits.size - by_kv(excess)))

"""Where techniques begin, or cease, to pay: drafts, fp8 on the wire, two pools. Pure."""

from __future__ import annotations

import msgspec
import numpy as np

from cluster.planner.colocated import Unsplit, unsplit
from cluster.planner.pools import Sized, Wanted, sized
from cluster.planner.roofline import ACCEPTANCES, Drafting, drafted, pays_up_to
from cluster.sizing.moments import service
from engine.kv_cache.kv_format import Codec

LARGEST = 512
"""Batch up to which drafts are looked at."""
LOOSEST_S = 0.2
"""TPOT objective up to which two pools are held against unsplit workers."""
LOOKS = 24


class Drafts(msgspec.Struct, frozen=True, kw_only=True):
    """``speedup``: tokens a second over plain decoding, at the planned batch; 1: drafts do not
    pay. ``pays_up_to``: a batch; LARGEST: at least to there."""

    acceptance: float
    nodes: float  # for each sequence, at the planned batch
    speedup: float
    pays_up_to: int


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """KV of a token as it is computed and in fp8. ``hidden_*``: GB/s of a link, from which on a
    prompt's KV is sent as quickly as it is computed. ``fp8_below``: GB/s of a link, below which
    turning KV into fp8 and back takes less time than it saves; ``ms_*``: of the mean prompt's KV
    on the planned link. ``codec``: that ``auto`` takes."""

    raw_bytes: float
    fp8_bytes: float
    hidden_raw: float
    hidden_fp8: float
    fp8_below: float
    ms_raw: float
    ms_fp8: float
    codec: str


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Workers at one TPOT objective; None: no number meets it."""

    tpot_s: float
    split: int
    mixed: int | None
    apart: int | None


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of two pools; ``mixed`` and ``apart``: the best of unsplit workers on the GPUs of
    either (see unsplit.py), None: no number of them meets both objectives. ``looks``: the same
    against the TPOT objective, from the least that is possible to LOOSEST_S."""

    split: int
    mixed: Unsplit | None
    apart: Unsplit | None
    looks: tuple[Look, ...]

    @property
    def pays(self) -> list[tuple[float, float]]:
        """Ranges of the TPOT objective in which two pools want no more workers than mixed steps."""
        found: list[tuple[float, float]] = []
        going = False
        for look in self.looks:
            if look.mixed is not None and look.split > look.mixed:
                going = False
                continue
            first = found.pop()[0] if going else look.tpot_s
            found.append((first, look.tpot_s))
            going = True
        return found


def drafts(wanted: Wanted, of: Sized) -> list[Drafts]:
    """For each of some acceptances."""
    like = wanted.drafting or Drafting(acceptance=0.0)
    acceptances = sorted({*ACCEPTANCES, *([like.acceptance] if wanted.drafting else [])})
    at, context = wanted.rates("decode"), wanted.workload.context
    found = []
    for a in acceptances:
        cell = drafted(wanted.shape, at, of.ceilings.size, context, a, like)
        most = pays_up_to(wanted.shape, at, context, a, like, LARGEST)
        found.append(Drafts(acceptance=a, nodes=cell.nodes, speedup=cell.speedup, pays_up_to=most))
    return found


def wire(wanted: Wanted, of: Sized) -> Wire:
    """Turning KV reads all of it in one form and writes it in the other, on both ends."""
    shape, load = wanted.shape, wanted.workload
    raw, fp8 = shape.wire_bytes(Codec.RAW), shape.wire_bytes(Codec.FP8)
    turning_s = sum((raw + fp8) / wanted.rates(role).bytes_s for role in wanted.gpus)
    machine = of.pools["prefill"].machine
    computed_s = service(load.mix, machine).mean_s / load.prompt  # for each token that is sent
    link = machine.link_bytes_s
    return Wire(
        raw_bytes=raw,
        fp8_bytes=fp8,
        hidden_raw=raw / computed_s / 1e9,
        hidden_fp8=fp8 / computed_s / 1e9,
        fp8_below=(raw - fp8) / turning_s / 1e9,
        ms_raw=load.prompt * raw / link * 1e3,
        ms_fp8=load.prompt * fp8 / link * 1e3,
        codec=shape.codec.name.lower(),
    )


def split(wanted: Wanted, of: Sized) -> Split:
    return Split(
        split=of.workers,
        mixed=best_unsplit(wanted, of, mixed=True),
        apart=best_unsplit(wanted, of, mixed=False),
        looks=tuple(
            _look(wanted, tpot_s)
            for tpot_s in np.geomspace(of.least_tpot_s * 1.02, LOOSEST_S, LOOKS).tolist()
        ),
    )


def best_unsplit(
    wanted: Wanted, of: Sized, *, mixed: bool, rate: float | None = None
) -> Unsplit | None:
    """The cheapest; ``rate``: instead of the workload's own."""
    asked = wanted.workload.mix.rate if rate is None else rate
    gpus = {gpu.name: gpu for gpu in wanted.gpus.values()}.values()
    tried = (unsplit(wanted, gpu, asked, of.pace, 16 * of.workers, mixed=mixed) for gpu in gpus)
    found = [u for u in tried if u is not None]
    return min(found, key=lambda u: (u.usd_per_hour or 0.0, u.workers), default=None)


def _look(wanted: Wanted, tpot_s: float) -> Look:
    goals = msgspec.structs.replace(wanted.goals, tpot_s=tpot_s)
    other = msgspec.structs.replace(wanted, goals=goals)
    of = sized(other)
    mixed, apart = (best_unsplit(other, of, mixed=way) for way in (True, False))
    return Look(
        tpot_s=tpot_s,
        split=of.workers,
        mixed=mixed.workers if mixed else None,
        apart=apart.workers if apart else None,
    )

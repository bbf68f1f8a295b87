"""GPU specifications by name, from a data file with its sources, or by figures. Pure."""

from __future__ import annotations

import difflib
import math
import tomllib
from functools import cache
from pathlib import Path

import msgspec

from protocol.errors import UsageError

FORM = "TFLOPS,GB/s,GiB, as in 989,3350,80 or 989,3350,80,fp8=1979,nvlink=900,link=50"
PRICED = "@USD per hour after it, as in H100@2.50"
LARGEST = 1e9
_NAMED = {"fp8": "fp8_tflops", "nvlink": "nvlink_gb_per_s", "link": "link_gb_per_s"}
"""Figures that may follow the three, with the names of the data file."""
_GIVEN = "as given"
_SUMMED = ("tflops", "fp8_tflops", "gb_per_s", "gib", "link_gb_per_s")


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The peak figures of the GPUs of one worker; the head of ``gpus.toml`` documents them.
    ``usd_per_hour`` None: unknown."""

    name: str
    tflops: float
    gb_per_s: float
    gib: float
    fp8_tflops: float = 0.0
    compute_share: float = 0.63
    nvlink_gb_per_s: float = 0.0
    link_gb_per_s: float = 12.5
    usd_per_hour: float | None = None
    price: str = ""  # source of the price
    source: str = ""
    also: str = ""  # a shorter name
    count: int = 1  # GPUs of a worker; all figures but the share and NVLink are of them together

    def group(self, count: int) -> GpuSpec:
        """Return ``count`` of these GPUs as one worker (tensor parallelism)."""
        if count == 1:
            return self
        sums = {name: count * getattr(self, name) for name in _SUMMED}
        price = None if self.usd_per_hour is None else count * self.usd_per_hour
        return msgspec.structs.replace(
            self, name=f"{count}x {self.name}", count=count, usd_per_hour=price, **sums
        )

    @property
    def flops(self) -> float:
        return self.tflops * 1e12

    def product_flops(self, weight_bytes: int) -> float:
        """Return the peak FLOP/s of products with weights of this size. A GPU without products in
        fp8 widens such weights as it reads them."""
        return (self.fp8_tflops if weight_bytes == 1 else 0.0) * 1e12 or self.flops

    def rate_notes(self, weight_bytes: int) -> list[str]:
        """Return sentences on the rates that it lacks, and the slower ones that are used."""
        found = []
        if weight_bytes == 1 and not self.fp8_tflops:
            found.append(
                f"{self.name} has no rate in fp8, so products with fp8 weights are as slow as in"
                f" bf16{'; if it has one, add fp8=TFLOPS' if self.source == _GIVEN else ''}."
            )
        if self.count > 1 and not self.nvlink_gb_per_s:
            found.append(
                f"{self.name} has no NVLink, so all-reduces go over PCIe"
                f"{'; if it has NVLink, add nvlink=GB/s' if self.source == _GIVEN else ''}."
            )
        return found

    @property
    def bytes_s(self) -> float:
        return self.gb_per_s * 1e9

    @property
    def memory(self) -> float:
        return self.gib * 2**30


@cache
def known_gpus() -> dict[str, GpuSpec]:
    """Return all GPUs of the data file by name."""
    raw = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    return {
        name: msgspec.convert({"name": name, **figures}, GpuSpec) for name, figures in raw.items()
    }


def find_gpu(text: str, option: str = "--gpu") -> GpuSpec:
    """Return the GPU that ``text`` names in full, or specifies as ``FORM``; ``PRICED`` replaces the
    price. Case and punctuation of names do not matter. Raises UsageError, which names ``option``.
    """
    name, at, price = text.partition("@")
    found = _by_numbers(name, option) if "," in name else _by_name(name, option)
    if not at:
        return found
    (usd,) = _numbers(price, 1) or (None,)
    if usd is None:
        raise UsageError(f"{option}: expected a price above 0, {PRICED}, not {text!r}")
    return msgspec.structs.replace(found, usd_per_hour=usd, price=_GIVEN)


def _by_name(text: str, option: str) -> GpuSpec:
    names = {
        _normalize(name): of.name
        for of in known_gpus().values()
        for name in (of.also, of.name)
        if name
    }
    wanted = _normalize(text)
    if wanted in names:
        return known_gpus()[names[wanted]]
    raise UsageError(f"{option}: {_unknown(text, names)}")


def _unknown(text: str, names: dict[str, str]) -> str:
    """Say that ``text`` is no GPU's name, with the names that contain it or are close to it."""
    wanted = _normalize(text)
    near = [name for plain, name in names.items() if len(wanted) > 1 and wanted in plain]
    near += [names[plain] for plain in difflib.get_close_matches(wanted, names, n=2, cutoff=0.5)]
    hint = f"; is it {' or '.join(dict.fromkeys(near))}?" if near else "."
    return f"{text!r} is not known{hint} Known: {', '.join(known_gpus())}; any other: {FORM}"


def _normalize(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def _by_numbers(text: str, option: str) -> GpuSpec:
    parts = text.split(",")
    numbers = _numbers(",".join(parts[:3]), 3)
    if not numbers:
        raise UsageError(f"{option}: expected {FORM}, all above 0, not {text!r}")
    tflops, gb_per_s, gib = numbers
    name = f"{tflops:g} TFLOPS, {gb_per_s:g} GB/s, {gib:g} GiB"
    given = GpuSpec(name=name, tflops=tflops, gb_per_s=gb_per_s, gib=gib, source=_GIVEN)
    return msgspec.structs.replace(given, **dict(_named_figure(p, option) for p in parts[3:]))


def _named_figure(text: str, option: str) -> tuple[str, float]:
    """Return the field and the number of ``NAME=NUMBER``. Raises UsageError."""
    name, _, value = text.partition("=")
    number, field = _numbers(value, 1), _NAMED.get(name.strip().lower())
    if field is None or not number:
        known = ", ".join(f"{known}=NUMBER" for known in _NAMED)
        raise UsageError(
            f"{option}: expected {known}, all above 0, after the three figures, not {text!r}"
        )
    return field, number[0]


def _numbers(text: str, count: int) -> list[float]:
    """Return ``count`` numbers above 0; an empty list where ``text`` is anything else."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    valid = all(math.isfinite(n) and 0 < n < LARGEST for n in found)
    return found if len(found) == count and valid else []

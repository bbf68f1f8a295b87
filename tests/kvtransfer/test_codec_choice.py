"""The codec and the size of frames: what is ready first on the link that there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ipc.settings import CopyCosts
from engine.kv_cache.kv_format import Codec, KVFormat, Precision, Storage
from kvtransfer.codec_choice import (
    FRAME_SECONDS,
    SMALLEST_FRAME,
    choose_codec,
    choose_frames,
    measures_link,
    seconds_per_raw_byte,
)
from protocol.errors import StartupError

SLOT = 4 << 20
UNKNOWN = CopyCosts()
CPU_COSTS = CopyCosts(read_raw=0.1e-9, read_fp8=1.2e-9, write_raw=0.2e-9, write_fp8=0.6e-9)
"""Of a wide pool of bf16 on one core, as measured."""


def format_of(
    precision: Precision = "fp8", storage: Storage = "wide", element_bytes: int = 2
) -> KVFormat:
    return KVFormat(
        precision=precision,
        storage=storage,
        layers=32,
        kv_heads=8,
        head_dim=128,
        element_bytes=element_bytes,
    )


seconds = st.floats(0, 1e-7)
costs = st.builds(
    CopyCosts, read_raw=seconds, read_fp8=seconds, write_raw=seconds, write_fp8=seconds
)
rates = st.floats(1e3, 1e13)
formats = st.builds(
    format_of,
    precision=st.just("fp8"),
    storage=st.sampled_from(["wide", "fp8"]),
    element_bytes=st.sampled_from([2, 4]),
)


def test_raw_on_a_fast_link_and_fp8_on_a_slow_one() -> None:
    for link, expected in ((100e6, Codec.FP8), (250e6, Codec.FP8), (2e9, Codec.RAW)):
        assert choose_codec(format_of(), "auto", CPU_COSTS, link) is expected


def test_pool_in_fp8_sends_its_bytes_at_any_rate() -> None:
    of = CopyCosts(read_raw=0.7e-9, read_fp8=0.1e-9, write_raw=1.2e-9, write_fp8=0.1e-9)
    for link in (1e8, 1e10, 1e13):
        assert choose_codec(format_of(storage="fp8"), "auto", of, link) is Codec.FP8


def test_fewest_bytes_while_the_costs_are_unknown() -> None:
    assert choose_codec(format_of(), "auto", UNKNOWN, 1e12) is Codec.FP8


@given(kv=formats, of=costs, link=rates)
def test_auto_is_never_later_than_another_choice(kv: KVFormat, of: CopyCosts, link: float) -> None:
    chosen = choose_codec(kv, "auto", of, link)
    at = {codec: seconds_per_raw_byte(kv, codec, of, link) for codec in kv.codecs}
    assert at[chosen] == min(at.values())


@given(kv=formats, of=costs, links=st.lists(rates, min_size=2, max_size=2))
def test_a_faster_link_never_changes_the_choice_to_fp8(
    kv: KVFormat, of: CopyCosts, links: list[float]
) -> None:
    slow, fast = (choose_codec(kv, "auto", of, link) for link in sorted(links))
    if slow is Codec.RAW:
        assert fast is Codec.RAW


@given(kv=formats, of=costs, link=rates, slot=st.integers(1 << 18, 1 << 24))
def test_frames_last_as_long_as_planned_and_fit_a_slot(
    kv: KVFormat, of: CopyCosts, link: float, slot: int
) -> None:
    codec, frame_bytes = choose_frames(kv, "auto", of, link, slot)
    least = max(SMALLEST_FRAME, kv.block_layer_bytes(codec))
    assert min(least, slot) <= frame_bytes <= slot
    if least < frame_bytes < slot:
        assert frame_bytes == pytest.approx(link * FRAME_SECONDS, rel=1e-5)


def test_frame_holds_a_layer_of_a_block_on_the_slowest_link() -> None:
    kv = format_of(element_bytes=4)  # 256 KiB
    wide = KVFormat(
        precision="exact", storage="wide", layers=2, kv_heads=32, head_dim=128, element_bytes=4
    )
    assert choose_frames(kv, "raw", UNKNOWN, 1e3, SLOT).frame_bytes == SMALLEST_FRAME
    assert choose_frames(wide, "raw", UNKNOWN, 1e3, SLOT).frame_bytes == 1 << 20
    assert choose_frames(wide, "raw", UNKNOWN, 1e9, SLOT).frame_bytes == 2_000_000
    assert choose_frames(wide, "raw", UNKNOWN, float("inf"), SLOT).frame_bytes == SLOT


def test_an_explicit_choice_stays() -> None:
    for link in (1e6, 1e12):
        assert choose_codec(format_of(), "raw", CPU_COSTS, link) is Codec.RAW
        assert choose_codec(format_of(), "fp8", CPU_COSTS, link) is Codec.FP8
    with pytest.raises(StartupError, match="would round KV"):
        choose_codec(format_of("exact"), "fp8", CPU_COSTS, 1e9)
    assert choose_codec(format_of("exact"), "auto", CPU_COSTS, 1e6) is Codec.RAW


def test_rate_that_encoding_sets_is_not_taken_for_that_of_the_link() -> None:
    """Encoding takes 1.2 ns for each byte of raw KV, and so twice as long for one of its frame."""
    wide, bytes_ = format_of(), format_of(storage="fp8")
    assert measures_link(wide, Codec.FP8, CPU_COSTS, 100e6)
    assert not measures_link(wide, Codec.FP8, CPU_COSTS, 400e6)
    assert measures_link(wide, Codec.RAW, CPU_COSTS, 5e9)
    cheap = CopyCosts(read_raw=0.7e-9, read_fp8=0.1e-9, write_raw=1.2e-9, write_fp8=0.1e-9)
    assert measures_link(bytes_, Codec.FP8, cheap, 2e9)
    assert measures_link(wide, Codec.FP8, UNKNOWN, 1e12)

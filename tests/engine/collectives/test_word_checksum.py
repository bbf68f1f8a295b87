"""The checksum that a GPU can compute, against its formula and the damage that it must find."""

import random

import pytest
import torch

from engine.collectives.word_checksum import PORTION, WordChecksum, draw_keys, sum_on_device
from tests.engine.collectives.pair_engines import make_bytes

CHECKSUM = WordChecksum(torch.device("cpu"))
MODULUS = 1 << 64


def formula(frame: torch.Tensor) -> int:
    """The docstring's sum over 32-bit words, with Python's integers."""
    low, high, portion_keys = (draw_keys(i, n).tolist() for i, n in ((1, 512), (2, 512), (3, 4)))
    words = [int(w) % (1 << 32) for w in frame.view(torch.int32).tolist()]
    total = len(words) * 4 * 0x9E3779B97F4A7C15
    for j, word in enumerate(words):
        portion, i = divmod(j // 2, PORTION)
        before = high[i - 1] << 32 if i else 0
        key = high[i] + (low[i] << 32) if j % 2 else low[i] + before
        total += portion_keys[portion] * word * key
    return total % MODULUS


class DeviceChecksum(WordChecksum):
    """The operations of a GPU, on the CPU."""

    def _portion_sum(self, words: torch.Tensor) -> torch.Tensor:
        count = words.numel()
        return sum_on_device(words, self._low[:count], self._high[:count])


@pytest.mark.parametrize("nbytes", [0, 8, 16, 24, 4096])
def test_sum_follows_the_formula_on_cpu_and_device(nbytes: int) -> None:
    frame = make_bytes(nbytes, nbytes)
    assert CHECKSUM.sum(frame) == formula(frame)
    assert DeviceChecksum(torch.device("cpu")).sum(frame) == formula(frame)


def test_cpu_and_device_agree_over_several_portions() -> None:
    frame = make_bytes(1, 8 * (2 * PORTION + 3))
    assert DeviceChecksum(torch.device("cpu")).sum(frame) == CHECKSUM.sum(frame)


def test_keys_are_odd_and_differ() -> None:
    keys = [key for stream in (1, 2, 3) for key in draw_keys(stream, 4096).tolist()]
    assert all(key % 2 for key in keys)
    assert len(set(keys)) == len(keys)
    assert draw_keys(1, 10).tolist() == draw_keys(1, 4096)[:10].tolist()


@pytest.mark.long
def test_every_flipped_bit_of_every_word_is_found() -> None:
    frame = make_bytes(2, 512)
    good = CHECKSUM.sum(frame)
    for bit in range(8 * frame.numel()):
        damaged = frame.clone()
        damaged[bit // 8] ^= 1 << (bit % 8)
        assert CHECKSUM.sum(damaged) != good, bit


@pytest.mark.long
def test_every_changed_word_and_every_pair_of_top_bits_is_found() -> None:
    words = make_bytes(3, 512).view(torch.int32)
    good = CHECKSUM.sum(words.view(torch.uint8))
    for i in range(words.numel()):
        damaged = words.clone()
        damaged[i] = random.Random(i).getrandbits(31) if words[i] else 1
        assert CHECKSUM.sum(damaged.view(torch.uint8)) != good, i
        for j in range(i):
            flipped = words.clone()
            flipped[[i, j]] ^= -(1 << 31)
            assert CHECKSUM.sum(flipped.view(torch.uint8)) != good, (i, j)


@pytest.mark.long
def test_every_swap_of_words_that_differ_in_the_sign_alone_is_found() -> None:
    for width in (torch.int32, torch.int64):
        words = torch.zeros(512 // width.itemsize, dtype=width)
        words[::2] = torch.iinfo(width).min  # -0.0 and 0.0, as values of a model may be
        good = CHECKSUM.sum(words.view(torch.uint8))
        for i in range(0, words.numel(), 2):
            for j in range(1, words.numel(), 2):
                swapped = words.clone()
                swapped[[i, j]] = words[[j, i]]
                assert CHECKSUM.sum(swapped.view(torch.uint8)) != good, (width, i, j)


def test_shifts_truncations_and_swapped_portions_are_found() -> None:
    frame = make_bytes(4, 8 * 2 * PORTION)
    good = CHECKSUM.sum(frame)
    for shift in (1, 2, 4, 8, 64, 4096, 8 * PORTION):
        assert CHECKSUM.sum(frame.roll(shift)) != good, shift
    zeros = torch.zeros(4096, dtype=torch.uint8)
    sums = {CHECKSUM.sum(zeros[:n]) for n in range(0, 4097, 8)}
    assert len(sums) == 513  # even zeros cut off are found


def test_frames_that_are_no_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="9 bytes"):
        CHECKSUM.sum(torch.zeros(9, dtype=torch.uint8))

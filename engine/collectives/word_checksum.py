"""A checksum of a frame that a GPU can compute: an order-free sum of words times odd keys.

    checksum = nbytes * LENGTH_KEY + sum over portions p of M[p] * sum over 32-bit words j of
               word[j] * K[j]                                                       (modulo 2^64)

with, for the 64-bit word i of a portion that consists of the 32-bit words 2i (low) and 2i + 1,

    K[2i] = A[i] + 2^32 * B[i - 1]      K[2i + 1] = B[i] + 2^32 * A[i]      B[-1] = 0

A, B and M are odd and drawn from a counter. Every change within one 32-bit word is found, because
an odd number times a difference below 2^32 is not 0. Keys for 64-bit words would miss two flipped
top bits: 2^63 times the sum of two odd keys is 0. Any other change is missed with a probability of
2^-32 at most for the worst pattern, and of 2^-64 for one without a pattern. The sum proves that
nothing was damaged or mixed up, not that no attacker changed it.

The split into A and B makes it two dot products of 64-bit words on a CPU: one of the words as they
lie, and one of the words that begin 4 bytes later. No order of summation changes a sum modulo 2^64,
so a CPU and a GPU agree exactly.
"""

from __future__ import annotations

import torch

PORTION = 1 << 16  # 64-bit words that use the same keys, so that the keys stay in a CPU's cache
MAX_PORTIONS = 1 << 12  # 2 GiB
_MASK = (1 << 64) - 1
_LENGTH_KEY = 0x9E3779B97F4A7C15


def draw_keys(stream: int, count: int) -> torch.Tensor:
    """Return ``count`` odd keys, int64 [count], on the CPU: SplitMix64 of a counter (Steele, Lea,
    Flood: Fast splittable pseudorandom number generators, 2014)."""
    counter = torch.arange(1, count + 1, dtype=torch.int64) + (stream << 40)
    z = counter * _signed(_LENGTH_KEY)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift_right(z, 31)) | 1


class WordChecksum:
    """Computes checksums of frames that lie on one device. The keys take 1 MiB of its memory.

    The engine creates one for its device; a call waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._low = draw_keys(1, PORTION).to(device)  # A
        self._high = draw_keys(2, PORTION).to(device)  # B
        self._portions = draw_keys(3, MAX_PORTIONS).tolist()  # M

    def sum(self, frame: torch.Tensor) -> int:
        """Return the checksum, 0 <= c < 2^64, of a contiguous uint8 tensor [bytes] on this device.
        Raises ValueError if its bytes are no multiple of 8 or too many."""
        nbytes = frame.numel()
        if nbytes % 8 or nbytes > 8 * PORTION * MAX_PORTIONS:
            raise ValueError(f"a frame of {nbytes} bytes has no word checksum")
        words = frame.view(torch.int64)
        sums = [self._portion_sum(part) for part in words.split(PORTION)] if nbytes else []
        total = nbytes * _LENGTH_KEY
        if sums:
            values = torch.stack(sums).tolist()  # one wait for the device
            total += sum(m * s for m, s in zip(self._portions, values, strict=False))
        return total & _MASK

    def _portion_sum(self, words: torch.Tensor) -> torch.Tensor:
        count = words.numel()
        add_up = sum_on_cpu if words.device.type == "cpu" else sum_on_device
        return add_up(words, self._low[:count], self._high[:count])


def sum_on_device(words: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the inner sum of one portion: int64 [words], A and B of the same length -> []."""
    from_high_half = _shift_right(words, 32)
    from_high_half[:-1] |= words[1:] << 32  # no low half follows the last high half
    return (words * low).sum() + (from_high_half * high).sum()


def sum_on_cpu(words: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the same as ``sum_on_device`` for words [n] on the CPU, without copying them."""
    last = _shift_right(words[-1], 32) * high[-1]
    return torch.dot(words, low) + torch.dot(_from_high_half(words), high[:-1]) + last


def _from_high_half(words: torch.Tensor) -> torch.Tensor:
    """Return the 64-bit words that begin 4 bytes after those of a CPU tensor, one less. Nothing is
    copied; a CPU reads words at any address."""
    if words.numel() < 2:
        return words[:0]
    return torch.frombuffer(words.numpy().data.cast("B")[4:-4], dtype=torch.int64)


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int64 words shifted right as if they had no sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value

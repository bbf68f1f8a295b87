"""Keys of KV blocks: a chained, keyed hash over spans of BLOCK_TOKENS tokens.

    root  = H(cluster secret; tenant, model fingerprint, KV precision[, salt])
    key_0 = H(root,  tokens[0:32])
    key_i = H(key_i-1, tokens[32i:32i+32])

A key stands for a whole prefix, so equal keys mean equal KV. Without the root, the keys of another
tenant can be neither computed nor probed. H is BLAKE2b with a 16-byte digest (RFC 7693). Engines
key their prefix caches with these, and routers their prefix index.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

BLOCK_TOKENS = 32
"""Tokens in a KV block, the same in the whole cluster."""

KEY_BYTES = 16

KEYS_AT_ONCE = 512
"""Keys that are computed without a pause where an event loop waits for them: some 0.5 ms."""


def cache_root(
    secret: bytes, tenant: str, fingerprint: str, precision: str, salt: str = ""
) -> bytes:
    """Return the root key of one prefix-cache namespace, 16 bytes.

    ``secret`` has at most 64 bytes. A client may send a ``salt``, which gives it a namespace of its
    own within that of its tenant."""
    h = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"baton-root")
    for part in (tenant, fingerprint, precision, *([salt] if salt else [])):
        data = part.encode()
        h.update(len(data).to_bytes(4, "little"))
        h.update(data)
    return h.digest()


def block_keys(root: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Return the keys of all full blocks of ``tokens``; an unfilled last block has none."""
    return [key for part in block_key_parts(root, tokens) for key in part]


def block_key_parts(root: bytes, tokens: Sequence[int]) -> Iterator[list[bytes]]:
    """Yield the same keys, at most KEYS_AT_ONCE with each step, so that an event loop can serve
    others in between: hashes of this size do not release the interpreter lock."""
    parent, span = root, BLOCK_TOKENS * 4
    for first in range(0, len(tokens), KEYS_AT_ONCE * BLOCK_TOKENS):
        keys = []
        packed = array("I", tokens[first : first + KEYS_AT_ONCE * BLOCK_TOKENS]).tobytes()
        for start in range(0, len(packed) - span + 1, span):
            h = hashlib.blake2b(parent, digest_size=KEY_BYTES)
            h.update(packed[start : start + span])
            parent = h.digest()
            keys.append(parent)
        yield keys

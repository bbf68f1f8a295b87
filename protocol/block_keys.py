"""Keys of KV blocks: a chained keyed hash over spans of tokens.

    root  = H(cluster secret; tenant, model fingerprint, KV precision[, salt])
    key_0 = H(root,  tokens[0:32])
    key_i = H(key_i-1, tokens[32i:32i+32])

A key stands for a whole prefix, so equal keys mean equal KV, and who does not know the root can
neither compute nor probe the keys of another tenant. H is BLAKE2b with a 16-byte digest (RFC 7693).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 32
"""Tokens in a block: a constant of the cluster."""

KEY_BYTES = 16


def cache_root(
    secret: bytes, tenant: str, fingerprint: str, precision: str, salt: str = ""
) -> bytes:
    """Root key of one prefix-cache namespace, 16 bytes. ``secret`` has at most 64 bytes; a ``salt``
    is the caller's own, and narrows the tenant's namespace."""
    h = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"baton-root")
    for part in (tenant, fingerprint, precision, *([salt] if salt else [])):
        data = part.encode()
        h.update(len(data).to_bytes(4, "little"))
        h.update(data)
    return h.digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of the block that holds ``tokens`` (exactly BLOCK_TOKENS of them) after ``parent``."""
    assert len(tokens) == BLOCK_TOKENS
    h = hashlib.blake2b(parent, digest_size=KEY_BYTES)
    h.update(array("I", tokens).tobytes())
    return h.digest()


def block_keys(root: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Keys of all full blocks of ``tokens``; an unfilled last block has none."""
    keys = []
    parent = root
    packed = array("I", tokens).tobytes()
    span = BLOCK_TOKENS * 4
    for start in range(0, len(packed) - span + 1, span):
        h = hashlib.blake2b(parent, digest_size=KEY_BYTES)
        h.update(packed[start : start + span])
        parent = h.digest()
        keys.append(parent)
    return keys

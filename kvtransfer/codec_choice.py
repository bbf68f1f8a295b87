"""Chooses the codec that a worker asks for when it receives KV; imported by settings as well."""

from __future__ import annotations

from typing import Literal, TypeAlias

from engine.kv_cache.kv_format import Codec, KVFormat
from protocol.errors import StartupError

CodecChoice: TypeAlias = Literal["auto", "raw", "fp8"]


def choose_codec(kv_format: KVFormat, choice: CodecChoice) -> Codec:
    """Return the codec to ask for; ``auto`` is the smallest one that changes no value.

    Raises StartupError for a codec that would round the KV."""
    codecs = {codec.name.lower(): codec for codec in kv_format.codecs}
    if choice == "auto":
        return min(codecs.values(), key=kv_format.page_layer_bytes)
    if choice not in codecs:
        raise StartupError(
            f"the codec {choice} would round KV, which has the precision {kv_format.precision}:"
            f" use {' or '.join(['auto', *codecs])}, or the precision fp8"
        )
    return codecs[choice]

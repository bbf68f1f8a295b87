"""``UsageLog``: one JSON line for each response that ended, for billing. ``router.usage_log`` names
the file.
"""

from __future__ import annotations

import msgspec

from router.common.json_lines_log import FILE_BYTES, JsonLinesLog


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line. ``prompt_tokens`` is 0 where the response ended before a first token."""

    time: float  # seconds since the epoch
    tenant: str
    request_id: str
    status: str  # ok, cancelled, or the HTTP status of its error
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class UsageLog(JsonLinesLog):
    """The log of one router. Raises StartupError for a file that cannot be opened."""

    def __init__(self, path: str, file_bytes: int = FILE_BYTES) -> None:
        super().__init__(path, "router.usage_log", file_bytes)

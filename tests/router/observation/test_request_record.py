"""The header ``traceparent`` (W3C Trace Context)."""

from __future__ import annotations

import pytest

from router.observation.request_record import TraceParent, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = TraceParent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), True)


@pytest.mark.parametrize(
    ("value", "parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", PARENT),
        (f"00-{TRACE}-{SPAN}-00", PARENT._replace(sampled=False)),
        (f"00-{TRACE}-{SPAN}-03", PARENT),
        (f"cc-{TRACE}-{SPAN}-01-later-fields", PARENT),
        (f"00-{TRACE}-{SPAN}-01-later-fields", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        ("", None),
        ("0" * 10_000, None),
    ],
)
def test_a_header_that_is_not_valid_is_ignored(value: str, parent: TraceParent | None) -> None:
    assert parse_traceparent(value) == parent

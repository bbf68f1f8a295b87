"""``CustomInputScanner``: the text inside the arguments of a custom tool's call, as it comes.

{"input":"a \\"b\\""}  -->  a "b"
"""

from __future__ import annotations

import json
import re

_HEAD = re.compile(r'\s{0,8}\{\s{0,8}"input"\s{0,8}:\s{0,8}"')
_HEAD_CHARS = 48  # no head is longer
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|u[0-9a-fA-F]{4})'
)
_ESCAPE_CHARS = 12  # of a pair of surrogates


class CustomInputScanner:
    """Decodes one JSON string that arrives in pieces.

    Arguments of another form, as from a model without a grammar, are the input as they stand.
    """

    def __init__(self) -> None:
        self._waiting = ""  # not yet decoded
        self._has_begun = self._has_ended = self._is_plain = False

    def push(self, text: str) -> str:
        """Return the part of the input that ``text`` completes."""
        if self._has_ended:
            return ""
        self._waiting += text
        if not self._has_begun and not self._begin():
            return ""
        return self._take_all() if self._is_plain else self._decode(last=False)

    def flush(self) -> str:
        """Return the rest when no more text will come."""
        if not self._has_begun:
            is_cut = '{"input":"'.startswith("".join(self._waiting.split()))
            return "" if is_cut else self._take_all()
        return "" if self._has_ended or self._is_plain else self._decode(last=True)

    def _begin(self) -> bool:
        found = _HEAD.match(self._waiting)
        if found:
            self._waiting = self._waiting[found.end() :]
        elif len(self._waiting) <= _HEAD_CHARS:
            return False
        self._has_begun, self._is_plain = True, found is None
        return True

    def _take_all(self) -> str:
        text, self._waiting = self._waiting, ""
        return text

    def _decode(self, *, last: bool) -> str:
        out, at, text = [], 0, self._waiting
        while at < len(text):
            if text[at] == '"':
                self._has_ended, at = True, len(text)
            elif text[at] != "\\":
                found = _PLAIN.match(text, at)
                assert found is not None
                out.append(found[0])
                at = found.end()
            else:
                escape = _ESCAPE.match(text, at)
                if len(text) - at < _ESCAPE_CHARS and not last and not _is_whole(escape):
                    break
                if escape is None:
                    out.append(text[at])
                    at += 1
                    continue
                out.append(json.loads(f'"{escape[0]}"'))
                at = escape.end()
        self._waiting = text[at:]
        return "".join(out).encode("utf-8", "replace").decode()


def _is_whole(escape: re.Match[str] | None) -> bool:
    """Return whether nothing that follows can belong to the escape."""
    return escape is not None and not re.match(r"\\u[dD][89abAB]..\Z", escape[0])

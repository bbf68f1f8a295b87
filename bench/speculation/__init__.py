"""Speculative decoding beside plain decoding: `python -m bench.speculation`."""

"""Benchmarks against the limits of the machine and against peers. None is a test.

Each ends with one JSON line: {"bench": ..., "rows": [{"name", "value", "unit", "against",
"ratio"}]}; a ratio is against a limit or a peer of the same run, and larger is better.
"""

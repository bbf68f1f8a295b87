"""What crosses a process boundary: requests, errors, block keys, RPC messages, the directory.

Torch-free, and imports nothing else of Baton: every other package may import this one.
"""

"""Finds problems before anything is started: the checks of `baton doctor` and of every start.

A check consists of two functions: ``collect`` looks at the machine and returns facts; ``judge`` is
pure and turns facts into findings. `baton doctor` runs all checks, a start those it depends on.
"""

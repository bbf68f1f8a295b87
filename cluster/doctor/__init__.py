"""What can be known to go wrong before anything is started: facts, and what follows from them.

A check is two functions: ``collect`` looks at the machine and returns facts, ``judge`` turns facts
into findings and looks at nothing. `baton doctor` runs all of them, a start those that concern it.
"""

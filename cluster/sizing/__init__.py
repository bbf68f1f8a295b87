"""How many workers each pool needs, and what to do about it: pure functions of a snapshot.

    snapshot.py    all that the policy may look at         queueing.py   Erlang C, waiting times
    demand.py      workers that each role needs            policy.py     snapshot --> decision
    decision.py    what it says, with its reasons

The autoscaler (`cluster/autoscale`), `baton plan` and `baton simulate` call the same functions.
"""

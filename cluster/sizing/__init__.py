"""The sizing policy: how many workers each pool needs and what to change. Pure functions of a
snapshot.

    snapshot.py       everything that the policy may look at
    queueing.py       service times of prompts, Erlang C, late prompts
    residency.py      KV and batches of sequences on decode workers
    demand.py         workers that each role needs
    worker_counts.py  workers that run and start
    actions.py        loans, starts and stops
    policy.py         snapshot --> decision

The autoscaler (`cluster/autoscale`), `baton plan` and `baton simulate` call the same functions.
"""

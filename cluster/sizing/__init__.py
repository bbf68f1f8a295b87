"""The sizing policy: how many workers each pool needs and what to change. Pure functions of a
snapshot.

    snapshot.py       everything that the policy may look at
    queueing.py       service times of prompts, Erlang C, late prompts
    burstiness.py     arrivals that come in bursts
    residency.py      KV and batches of sequences on decode workers
    demand.py         workers that each role needs
    predict.py        relative speeds and latencies of workers
    corrections.py    observed over predicted
    growth.py         growth of the load while a worker starts
    memory.py         demand and growth of the past
    worker_counts.py  workers that run and start
    actions.py        loans, starts and stops
    decision.py       the decision, its record and its text
    policy.py         snapshot --> decision

The autoscaler (`cluster/autoscale`), `baton plan` and `baton simulate` call the same functions.
"""

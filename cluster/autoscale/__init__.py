"""The autoscaler: what the traffic asks of the pools, read, decided and carried out.

    reading/     what is seen of the cluster         settings.py  what it is told at its start
    loop.py      look -> snapshot -> decide -> act   process.py   all of it together
    replicas.py  numbers of workers, through Serve   loans.py     roles of workers (lend.py)
    log.py       decisions as JSON lines             lease.py     one acts, the others watch
    metrics.py   its page                            starts.py    how long a worker takes to start

What is decided is `cluster.sizing`'s.
"""

"""The autoscaler process: reads the traffic, asks the sizing policy, and carries its decisions out.

    loop.py            read -> snapshot -> decide -> act  process.py       all parts together
    replica_counts.py  numbers of workers, through Serve  loans.py         roles of workers
    decision_log.py    decisions as JSON lines            acting_lease.py  elects the one that acts
    start_times.py     how long starts take               metrics.py       its metrics page

`cluster.sizing` decides; `cluster.observation` reads.
"""

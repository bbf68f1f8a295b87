"""Streams through a pool to which everything happens at once, and what is left afterwards.

    python -m bench.chaos --minutes N

``soak`` runs the rounds, ``faults`` has what is done to the pool, ``tenants`` the clients beside
the checked streams, and ``leaks`` the measurements of processes and workers. Tests use ``kills``.
"""

"""The program of a worker of either role: an engine process and the front that serves it.

    worker           the life of a worker, and its record in the directory
    engine_main      entry of the engine process
    role_service     changes of the role
    event_log        cache events in Redis
    utilisation      how much of the machine's ceilings is used
    metrics          Prometheus metrics; metric_families makes them

To add a metric of a worker, see the docstring of ``metrics``. To add a configuration key, see
``cluster.config``.
"""

"""The cluster's state at a glance: scrapes the metrics of all processes and computes an overview.

``baton status`` (``cluster_scraper``) and ``/ui`` (``live_overview``) both show a
``ClusterOverview``.
"""

"""What watches a cluster: Prometheus' rules and alerts, and the files that it starts with."""

"""What the autoscaler observes of a cluster, from the directory and from routers or Prometheus."""

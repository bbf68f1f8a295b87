"""What the autoscaler knows of a cluster, from the directory, routers or Prometheus."""

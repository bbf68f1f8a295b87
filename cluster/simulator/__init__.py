"""`baton simulate`: runs a workload on a simulated cluster through the product's own decisions."""

"""`baton plan`: sizes the pools for a model, a GPU and a workload without a cluster."""

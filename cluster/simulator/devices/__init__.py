"""The simulated cluster: clock, workers, links, requests, routing."""

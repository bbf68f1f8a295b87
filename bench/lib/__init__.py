"""What several benchmarks and the tests share: clients, clusters, models, result lines."""

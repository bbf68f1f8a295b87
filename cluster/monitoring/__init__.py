"""Writes what Prometheus starts with: its configuration, recording rules and alerting rules."""

"""Grafana's dashboards: their generator and provisioning."""

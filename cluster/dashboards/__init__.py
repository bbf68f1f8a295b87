"""Defines and generates Grafana's dashboards; ``made`` holds the generated JSON."""

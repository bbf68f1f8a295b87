"""Defines the panels of the dashboards in rows, and the PromQL that they query."""

"""Grafana's dashboards: what they ask and show, and the files that Grafana starts with."""

from __future__ import annotations

from cluster.monitoring.dashboards.boards import DASHBOARDS, note_queries, queries

__all__ = ["DASHBOARDS", "note_queries", "queries"]

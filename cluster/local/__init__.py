"""Helpers for this machine: processes, ports, run folders, the embedded Redis, start reports."""

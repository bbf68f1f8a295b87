"""Starts and stops a cluster on one machine."""

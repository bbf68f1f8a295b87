"""Starts and stops a cluster on one machine, and single processes without Ray."""

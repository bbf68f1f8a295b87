"""Certificates, API keys, and what the nodes of a cluster share."""

"""The cluster token, certificates and mutual TLS."""

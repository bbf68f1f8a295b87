"""Connections of clients before HTTP: how many are open, which are accepted and which give way."""

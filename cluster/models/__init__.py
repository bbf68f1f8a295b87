"""The model that a cluster serves, and its draft model: on this machine or downloaded."""

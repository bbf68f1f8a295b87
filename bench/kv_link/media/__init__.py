"""Ends of the bare media and of NIXL, each of which moves one buffer into another."""

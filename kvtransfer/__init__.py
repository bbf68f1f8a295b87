"""Moves KV blocks between workers: frames and their checks, credits, the gRPC transport."""

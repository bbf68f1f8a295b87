"""Tenants: API keys, what a key may do, limits per minute, and usage over all routers."""

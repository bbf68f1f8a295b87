"""Prompts of both endpoints become token ids: lengths are bounded, work is shared by tenants."""

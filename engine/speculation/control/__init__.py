"""Drafting policy: draft lengths, acceptance, costs, exploration, and the engine's Speculator."""

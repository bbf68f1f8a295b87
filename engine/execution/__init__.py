"""The engine: one step from plan to tokens, and how an engine is loaded."""

"""The copy thread of an engine process: KV frames between slots of the arena and the pool."""

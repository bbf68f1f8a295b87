"""The paged KV pool, its fp8 grid, and the block manager that owns pages."""

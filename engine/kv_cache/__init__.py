"""The paged KV pool, its formats and fp8 grid, and the block manager that owns the pages."""

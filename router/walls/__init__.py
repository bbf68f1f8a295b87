"""Which wall binds a pool of workers, what would relax it, and how much that would bring."""

"""The resource that limits each pool, the techniques that would relax it, and their gain."""

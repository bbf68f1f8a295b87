"""Response objects and chunks."""

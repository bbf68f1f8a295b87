"""Request bodies and their checks."""

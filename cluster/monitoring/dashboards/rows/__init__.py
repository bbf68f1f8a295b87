"""The rows of panels, one file each; each answers a question."""

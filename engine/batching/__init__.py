"""The packed batch of a step: rows, attention metadata, and the layout of draft nodes."""

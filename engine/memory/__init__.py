"""The memory of an engine: what it takes is estimated before anything is loaded, without torch."""

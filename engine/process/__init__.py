"""The engine process, and its client in the front."""

"""The engine: how it is loaded, and how one step runs from plan to tokens."""

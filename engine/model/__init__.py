"""The decoder: weights, layers, attention, one forward pass over a packed batch."""

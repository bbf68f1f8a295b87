"""Which model is served, and how it is found or downloaded."""

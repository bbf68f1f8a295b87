"""The packed batch of one step, and what its rows attend to."""

"""One module for each fuzz target; ``tests.fuzz.target.TARGET_NAMES`` lists them."""

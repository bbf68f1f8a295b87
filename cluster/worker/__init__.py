"""The program of a worker of either role."""

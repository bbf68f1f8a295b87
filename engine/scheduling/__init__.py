"""Sequences, the scheduler, the step policy and the step-time model. Torch-free."""

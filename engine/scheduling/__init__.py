"""Sequences, the scheduler, the step policy and the step-time model, all without torch."""

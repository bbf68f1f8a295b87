"""Fuzzing: hostile bytes at every decoder, with limits on time and memory for each byte."""

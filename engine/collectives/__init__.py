"""Frames sent between engines by collective libraries (NCCL, gloo), outside the step loop."""

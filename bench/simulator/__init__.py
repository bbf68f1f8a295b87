"""What the simulator predicts, and how accurate it is."""

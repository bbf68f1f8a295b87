"""What workers, launchers and autoscalers are told at their start."""

"""gRPC and metrics endpoints that every process opens alike."""

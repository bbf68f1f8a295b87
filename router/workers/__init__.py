"""The router's view of the workers and its gRPC links to decode workers."""

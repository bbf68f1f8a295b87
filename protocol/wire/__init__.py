"""Generated code of the RPC messages."""

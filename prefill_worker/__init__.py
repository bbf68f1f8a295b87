"""The prefill role: its step policy and its RPC."""

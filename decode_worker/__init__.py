"""The decode role: its step policy, the hand-over of a request, and its RPC."""

"""The prefill role of a worker: the Prefill.Run service and its step policy."""

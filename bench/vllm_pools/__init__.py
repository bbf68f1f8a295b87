"""Baton's two pools beside vLLM's own split of prefill and decode."""

"""Messages, channel, shared memory and counters between the engine process and its front."""

"""What the front and the engine process exchange: messages, channel, shared memory. Torch-free."""

"""Records of live processes in Redis: who is registered, for how long, and how busy."""

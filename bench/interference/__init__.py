"""Long prompts beside short chats: what they do to streams, and what bounds it."""

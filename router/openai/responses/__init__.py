"""``/v1/responses``: OpenAI's dialect of items, as a codec of chats and an emitter of events."""

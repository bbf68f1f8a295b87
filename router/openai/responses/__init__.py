"""``POST /v1/responses``: its bodies become chats, and their outputs its items and events."""

"""Anthropic's ``/v1/messages``: bodies become chats, and their outputs blocks and events."""

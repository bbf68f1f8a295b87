"""The OpenAI API: request bodies, chat templates and tools, answers."""

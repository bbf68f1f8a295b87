"""Chat templates, tool calls, and grammars that constrain outputs."""

"""Chat templates, tool calls, and grammars that outputs are held to."""

"""How models write their reasoning: markers, the parser, and grammars that wait for its end."""

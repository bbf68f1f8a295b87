"""How models write tool calls: their syntaxes, the grammar that enforces them, and the parser."""

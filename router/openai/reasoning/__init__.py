"""How models write their reasoning: markers, the grammar before an answer, and the parser."""

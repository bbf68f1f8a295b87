"""Output that matches a grammar: compilation, matchers, token masks."""

"""Structured output: text that matches a grammar. Compilation, matchers and token masks."""

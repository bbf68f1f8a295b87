"""The model families, a module for each, and their tool call syntaxes."""

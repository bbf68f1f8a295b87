"""Request length distributions, public trace formats and arrival processes."""

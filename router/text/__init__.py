"""Text to tokens and tokens to text: the served model's vocabulary."""

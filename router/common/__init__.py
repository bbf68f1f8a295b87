"""What all parts of the router share: errors, tenants, tokenizer, request bodies."""

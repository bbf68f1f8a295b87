"""Parts of the router that several folders use: errors, tenants, tokenizer, request bodies."""

"""Parts of the router that several folders use: errors, request bodies, turns of tenants."""

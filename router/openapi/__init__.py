"""The OpenAPI document of the server, with the endpoints of all dialects."""

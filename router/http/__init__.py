"""The router's HTTP server: routes, checks of requests, responses and their streams."""

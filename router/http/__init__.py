"""The ASGI application: routes, limits, a request's job, its response."""

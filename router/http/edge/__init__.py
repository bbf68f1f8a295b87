"""The outermost layer of the router's application: ids of requests, CORS, what is recorded."""

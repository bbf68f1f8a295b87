"""The outermost layers of the application: checks of heads, ids, CORS, what is recorded."""

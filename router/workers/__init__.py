"""The pool of workers and the streams to decode workers."""

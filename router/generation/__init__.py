"""One request across workers: placed, streamed, retried, measured."""

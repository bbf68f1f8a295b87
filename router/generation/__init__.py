"""One choice of a request: placed on workers, streamed, retried and measured."""

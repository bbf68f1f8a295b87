"""The OpenAI front door: checks requests, picks workers, streams text. Torch-free.

One line per module, in the order a request meets them:

    app          routes, lifespan; over ``state`` (all a router holds) and ``settings``
    request_id   a header on every response
    intake       from an HTTP request to a job, by the next four
    body         reads and decodes the HTTP body
    schema       checks its fields
    unsupported  what is not built yet, and is refused by name
    tokens       prompt to token ids
    respond      answers the job, streamed or whole
    generate     one request across workers: deadlines, retries, cancellation
    workers      the pool of workers, as the directory and the streams show it
    pick         which workers take a request: pure functions
    link         the stream to one decode worker
    mailbox      a request's tokens on their way from that stream to its handler
    text         tokens to text: ``detokenize``, then ``stop``
    wire_json    the JSON of responses
    errors       OpenAI-shaped errors
    metrics      Prometheus
"""

"""The OpenAI front door: checks requests, picks workers, streams text. Torch-free.

One line per module, in the order a request meets them:

    app          routes, lifespan; over ``state`` (all a router holds) and ``settings``
    request_id   a header on every response
    intake       from an HTTP request to a job, by the next eight
    body         reads and decodes the HTTP body
    api          what OpenAI's API says: bodies in, responses out
    chat         messages to a prompt, tools to a grammar, text to tool calls
    vocabulary   the model's tokenizer, and what its tokens say; ``tokens``: prompt to token ids
    formats      the model's chat template and grammars, built once
    plan         what a body asks for; ``completion_plan``, ``chat_plan``, ``room``
    job          the choices of a request, and all that answering it takes
    respond      answers the job, streamed or whole; ``merge`` makes its choices one stream
    choice       one choice: tokens to what a client gets; ``waiting``: what its text waits for
    generate     one request across workers: deadlines, retries, cancellation
    tenants      API keys and whose they are
    admission    429 when too much work is here
    attempt      one submission of a request, and its place in the books
    workers      the pool of workers, as the directory and the streams show it
    watch        who joins and leaves, told to the next four
    index        which worker holds which blocks; ``follow`` and ``cursor`` keep it up to date
    ledger       own work under way, by worker
    learned      links, corrections, output lengths, from what has been served
    placing      a request to its workers: snapshot, policy, ticket
    snapshot     all that a policy may look at
    policies     by name; ``choose`` is the one to use, by the formulas of ``cost`` (``terms``)
    step_model   how long a worker's steps take
    explain      why a request went where it did
    link         the stream to one decode worker
    mailbox      a request's tokens on their way from that stream to its handler
    text         tokens to text: ``detokenize``, then ``stop``
    wire_json    the JSON of responses
    errors       OpenAI-shaped errors
    metrics      Prometheus; ``meter``: the stopwatch of a request; ``slo``: what it met and missed
"""

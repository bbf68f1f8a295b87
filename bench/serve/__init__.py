"""`baton bench serve`: a load generator for any server that speaks the OpenAI API.

    options -> plan: when each request is due, how long it is, what it shares     (pure)
            -> probe: which fields the server takes; warm-up
            -> loop, client: sends, reads the streams                             -> records
            -> figures, timeline, result: percentiles, rates, goodput             (pure)
            -> table, page: a terminal, one HTML file

Times count from when a request was **due**, not from when it could be sent: a server that makes
the generator wait would otherwise hide its worst moments ("coordinated omission", G. Tene). The
same from sending is reported beside it. With `--concurrency` a request is due when it is sent.
"""

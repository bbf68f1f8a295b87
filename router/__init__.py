"""The router: checks OpenAI requests, chooses workers, streams text to clients. It needs no torch.

A chat request passes through these modules, in this order:

    http/server.py, http/limits.py     uvicorn, limits of connections
    http/app.py                        routes
    http/intake.py                     HTTP request to response object; errors of the client
    tenants, common/request_body.py    API key, rates, JSON body
    openai/bodies                      checks of the body
    http/generation_plan.py            prompt token ids, sampling, output options
    openai/prompts                     texts and chats to token ids, in lanes that tenants share
    openai/chat                        chat template, tools, grammars
    http/response.py                   GenerationResponse: sends the bytes of all choices
    generation/choice_stream.py        ChoiceStream: one choice, its submissions and retries
    generation/placer.py, placement    choice of workers: index, ledger, estimates, cost
    generation/submission.py           one attempt at one decode worker, and its token queue
    workers/decode_link.py             the gRPC stream to that worker
    generation/choice_text.py          ChoiceText: batches of tokens to deltas
    generation/output_text.py          tokens to text, stop strings, log-probabilities
    text                               vocabulary, detokenizer
    openai/answers                     the JSON of the response

Beside it: ``workers/pool.py`` (which workers there are), ``http/state.py`` (everything a router
holds), ``generation/metrics.py`` (Prometheus), ``walls``, ``overview`` and ``ui`` (the live page).
"""
